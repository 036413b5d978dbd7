"""Whatever is sent: no 5xx, no hang, and the text of a fixed request is the same afterwards."""

import json
from typing import Any

import anyio
import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.config import AppConfig
from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.completions import CompletionRequest
from deployments.openai.responses_request import ResponsesRequest
from engine.sampling.grammar import Grammars
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters, Rig

NUM_REQUESTS = 1000

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\ud800", "</s>", "<|start|>", "x" * 5000, ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fitting: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=20) | st.lists(st.integers(0, 258), min_size=1, max_size=5),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "assistant"]), "content": st.text(max_size=9)}
        ),
        max_size=3,
    ),
    "max_tokens": st.integers(0, 12),
    "n": st.integers(0, 4),
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(0, 1.2),
    "top_k": st.integers(-2, 300),
    "logprobs": st.integers(0, 21) | st.booleans(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-101, 101), max_size=3),
    "seed": st.integers(-(2**64), 2**64),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "speculative": st.fixed_dictionaries({"num_speculative_tokens": st.integers(-1, 6)}),
    "cache_salt": st.text(max_size=5),
    "echo": st.booleans(),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar"]),
        st.sampled_from([{}, {"type": "integer"}, '{"enum": ["x"]}', "[ab]{3}", "(a", ["x", "yz"], [], 'root ::= "a"']),
        max_size=2,
    ),
    "response_format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object", "json_schema"])}),
    "input": st.text(max_size=20),
    "max_output_tokens": st.integers(0, 12),
}
required_names = ("prompt", "messages", "input")
names = sorted({*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, *ResponsesRequest.model_fields})


def body_of(*required: str) -> st.SearchStrategy[dict[str, Any]]:
    """Requests that mostly fit, with some fields that do not and some that do not exist."""
    sound = st.fixed_dictionaries(
        {name: fitting[name] for name in required},
        optional={name: values for name, values in fitting.items() if name not in required_names},
    )
    odd = st.dictionaries(st.sampled_from(names) | st.text(max_size=8), junk, max_size=2)
    limit = "max_output_tokens" if "input" in required else "max_tokens"
    return st.builds(lambda first, second: {limit: 3, **first, **second}, sound, odd)


requests = (
    st.tuples(st.just("/v1/completions"), body_of("prompt"))
    | st.tuples(st.just("/v1/chat/completions"), body_of("messages"))
    | st.tuples(st.just("/v1/responses"), body_of("input"))
)


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    with anyio.fail_after(30):
        return await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


def test_no_request_is_an_internal_error_or_a_hang(config: AppConfig, grammars: Grammars) -> None:
    statuses: list[int] = []
    with anyio.from_thread.start_blocking_portal() as portal:

        async def start() -> tuple[Rig, httpx.AsyncClient]:
            rig = Rig(grammars=grammars)
            return rig, make_client(await make_app(config, LocalRouters(rig)))

        rig, client = portal.call(start)

        @settings(max_examples=NUM_REQUESTS, suppress_health_check=list(HealthCheck))
        @given(request=requests)
        def send(request: tuple[str, dict[str, Any]]) -> None:
            response = portal.call(post, client, *request)
            statuses.append(response.status_code)
            assert response.status_code in (200, 400, 404), (request, response.text)
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code", "request_id"}
            else:
                assert '"error":{' not in response.text
                assert "event: error" not in response.text

        fixed = {"prompt": "abc", "max_tokens": 20, "seed": 3, "temperature": 0.9}
        before = portal.call(post, client, "/v1/completions", fixed).json()["choices"]
        send()
        assert portal.call(post, client, "/v1/completions", fixed).json()["choices"] == before
        assert not rig.engine.has_work
        assert rig.engine.scheduler.pool.num_free == rig.engine.scheduler.pool.num_blocks
        portal.call(rig.loop.stop)
    assert {200, 400} <= set(statuses)
