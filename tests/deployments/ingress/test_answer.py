"""Answer: the same response however its tokens arrive, and a request that ends when its client leaves."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig
from deployments.ingress.answer import Answer
from deployments.openai.choices import Choice
from engine.sequence import FinishReason, RequestOutput
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters


def output(token: int, *, finish_reason: FinishReason | None = None, request_id: str = "a-0") -> RequestOutput:
    return RequestOutput(request_id, [token], "x", finish_reason, None, None, 3, 0, 0, 0)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": ["abc", "de"], "n": 2, "logprobs": 2, "echo": True}),
        ("/v1/completions", {"prompt": "abc", "stream_options": {"continuous_usage_stats": True}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_fewer_chunks_say_the_same(
    path: str, asked: dict[str, Any], config: AppConfig, routers: LocalRouters
) -> None:
    length = {"max_output_tokens": 8} if path == "/v1/responses" else {"max_tokens": 8, "return_token_ids": True}
    body = {"temperature": 0, "seed": 1, "ignore_eos": True, "stream": True, **length, **asked}
    heard = []
    for interval_s in (0.0, 3600.0):
        app = await make_app(config.model_copy(update={"stream_interval_s": interval_s}), routers)
        async with make_client(app) as client:
            heard.append(said(await client.post(path, json=body)))
    assert heard[1].pop("num_events") < heard[0].pop("num_events")
    assert heard[0] == heard[1]


async def test_acceptance_is_told_by_rounds_however_they_were_sent() -> None:
    choice = Choice(0, [1])
    rounds = [replace(output(token), num_draft_tokens=4, num_accepted_tokens=token) for token in range(3)]
    writer = SimpleNamespace(choices=[choice], chunk=lambda choice, output: [output])
    [joined] = Answer(writer, None)._chunks(rounds)
    assert (choice.num_drafted, choice.num_accepted) == ([4, 4, 4], [0, 1, 2])
    assert (joined.token_ids, joined.text, joined.num_accepted_tokens) == ([0, 1, 2], "xxx", 3)


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_response_that_is_not_streamed_leaves_the_router_once_a_sequence_at_most(
    num_prompts: int, client: httpx.AsyncClient, routers: LocalRouters
) -> None:
    await client.post("/v1/completions", json={"prompt": ["abc"] * num_prompts, "max_tokens": 8})
    assert 1 <= routers.num_deliveries <= num_prompts


def said(response: httpx.Response) -> dict[str, Any]:
    """What a stream says all in all: everything of each choice, joined, and how many events it took."""
    found: dict[str, Any] = {"num_events": 0}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        found["num_events"] += 1
        event = json.loads(line.removeprefix("data: "))
        if "delta" in event:
            found["text"] = found.get("text", "") + event["delta"]
        for choice in event.get("choices", ()):
            own = found.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": []})
            own["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            own["ids"] += choice.get("token_ids", [])
            own["prompt"] = own.get("prompt") or choice.get("prompt_token_ids")
            own["finish_reason"] = choice["finish_reason"]
            for entries in (choice.get("logprobs") or {}).values():
                own["logprobs"] += sorted(map(str, entries))
            own["logprobs"].sort()
        found["usage"] = event.get("usage") or found.get("usage")
    assert len(found) > 2, response.text
    return found
