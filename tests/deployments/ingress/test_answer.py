"""Answer: the same response however its tokens arrive, and a request that ends when its client leaves."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig
from deployments.errors import KINDS
from deployments.ingress import answer as answer_module
from deployments.ingress.answer import KEEP_ALIVE
from deployments.openai.responses_writer import ResponsesWriter
from engine.errors import ModelError, QueueFullError, TargetError
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters, Rig
from tests.deployments.requests import GREEDY, events


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["abc", "de"], "n": 2, "logprobs": 2, "echo": True}),
        ("/v1/completions", {"prompt": "abc", "stream_options": {"continuous_usage_stats": True}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_fewer_chunks_have_the_same_content(
    path: str, fields: dict[str, Any], config: AppConfig, routers: LocalRouters
) -> None:
    length = {"max_output_tokens": 8} if path == "/v1/responses" else {"max_tokens": 8, "return_token_ids": True}
    body = {"temperature": 0, "seed": 1, "ignore_eos": True, "stream": True, **length, **fields}
    contents = []
    for interval_s in (0.0, 3600.0):
        app = await make_app(config.model_copy(update={"stream_interval_s": interval_s}), routers)
        async with make_client(app) as client:
            contents.append(content_of(await client.post(path, json=body)))
    assert contents[1].pop("num_events") < contents[0].pop("num_events")
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["abc", "de"], "n": 2, "logprobs": 2, "echo": True, "stream": True}),
        ("/v1/completions", {"prompt": "abc", "prompt_logprobs": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
    ],
)
async def test_many_log_probabilities_are_written_on_a_thread(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Any] = []
    submit = answer_module._writing.submit
    monkeypatch.setattr(answer_module._writing, "submit", lambda *call: submitted.append(call) or submit(*call))
    contents = []
    for most, is_long in ((10**6, False), (0, True)):
        monkeypatch.setattr(answer_module, "MANY_LOGPROBS", most)
        response = await client.post(path, json={"temperature": 0, "seed": 1, "max_tokens": 4, **fields})
        assert bool(submitted) is is_long
        contents.append(content_of(response) if "stream" in fields else response.json()["choices"])
    assert contents[0] == contents[1]


async def test_events_that_repeat_many_log_probabilities_are_written_on_a_thread(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[str]] = {}
    write = ResponsesWriter._named_event

    def traced(writer: ResponsesWriter, type: str, **fields: Any) -> str:
        threads.setdefault(type, set()).add(threading.current_thread().name)
        return write(writer, type, **fields)

    monkeypatch.setattr(ResponsesWriter, "_named_event", traced)
    monkeypatch.setattr(answer_module, "MANY_LOGPROBS", 10)  # more than a round has
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    body = {"input": "hi", "temperature": 0, "max_output_tokens": 8, "stream": True, **logprobs}
    assert (await client.post("/v1/responses", json=body)).status_code == 200
    assert "MainThread" in threads["response.output_text.delta"]
    for repeating in ("output_text.done", "content_part.done", "output_item.done", "incomplete"):
        assert threads[f"response.{repeating}"] == {"long answers_0"}


async def test_a_silent_stream_gets_comments_and_loses_nothing(
    client: httpx.AsyncClient, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "abc", **GREEDY, "stream": True}
    expected = content_of(await client.post("/v1/completions", json=body))
    monkeypatch.setattr(answer_module, "KEEP_ALIVE_S", 0.001)
    rig.verifier.gate.clear()
    asyncio.get_running_loop().call_later(0.05, rig.verifier.gate.set)
    response = await client.post("/v1/completions", json=body)
    assert response.text.startswith(KEEP_ALIVE)
    assert content_of(response) == expected


async def test_tokens_of_a_response_that_is_not_streamed_come_now_and_then(
    client: httpx.AsyncClient, routers: LocalRouters, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "abc", "max_tokens": 8}
    expected = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert routers.num_deliveries == 1
    monkeypatch.setattr("deployments.ingress.ingress.WHOLE_INTERVAL_S", 0.0)
    assert (await client.post("/v1/completions", json=body)).json()["choices"] == expected
    assert routers.num_deliveries == 1 + 8


@pytest.mark.parametrize("error", [TargetError("gone"), TimeoutError("late"), ModelError("bug"), ValueError("bug")])
async def test_an_error_after_the_first_byte_is_an_event(
    client: httpx.AsyncClient, routers: LocalRouters, error: Exception
) -> None:
    routers.error = error
    *_, last = await events(client, "/v1/completions", prompt="abc")
    assert set(last["error"]) == {"message", "type", "param", "code", "request_id"}
    assert "bug" not in last["error"]["message"]


@pytest.mark.parametrize("error", [TargetError("gone"), QueueFullError("full"), ValueError("bug")])
async def test_an_error_before_the_first_byte_is_a_status(
    client: httpx.AsyncClient, routers: LocalRouters, error: Exception
) -> None:
    routers.error = error
    response = await client.post("/v1/completions", json={"prompt": "abc", **GREEDY})
    assert response.status_code == (KINDS[type(error)].status if type(error) in KINDS else 500)
    assert "bug" not in response.text
    assert ("retry-after" in response.headers) == (response.status_code in (429, 503))


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("error", [None, TargetError("gone"), ValueError("bug")])
async def test_every_request_is_closed_once_however_it_ends(
    client: httpx.AsyncClient, routers: LocalRouters, rig: Rig, is_stream: bool, error: Exception | None
) -> None:
    routers.error = error
    await client.post("/v1/completions", json={"prompt": ["a", "bc"], **GREEDY, "stream": is_stream})
    assert routers.num_closed == 1
    assert rig.engine.scheduler.pool.num_free == rig.engine.scheduler.pool.num_blocks


def content_of(response: httpx.Response) -> dict[str, Any]:
    """The content of a stream: everything of each choice, joined, and the number of events."""
    content: dict[str, Any] = {"num_events": 0}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        content["num_events"] += 1
        event = json.loads(line.removeprefix("data: "))
        if "delta" in event:
            content["text"] = content.get("text", "") + event["delta"]
        for choice in event.get("choices", ()):
            joined = content.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": []})
            joined["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined["ids"] += choice.get("token_ids", [])
            joined["prompt"] = joined.get("prompt") or choice.get("prompt_token_ids")
            joined["finish_reason"] = choice["finish_reason"]
            for entries in (choice.get("logprobs") or {}).values():
                joined["logprobs"] += sorted(map(str, entries))
            joined["logprobs"].sort()
        content["usage"] = event.get("usage") or content.get("usage")
    assert len(content) > 2, response.text
    return content
