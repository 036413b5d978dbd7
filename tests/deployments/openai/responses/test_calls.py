"""Calls in responses: as items of one body, and as events, through the official client."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.config import AppConfig
from deployments.openai.responses.request import ResponsesRequest
from deployments.openai.structured_output import StructuredOutputs
from tests.deployments.conftest import make_app, make_client, make_sdk
from tests.deployments.fakes import LocalRouters
from tests.deployments.templates import HERMES, save_tokenizer

TOOLS: Any = [{"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": False}]
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "a } b"}}\n</tool_call>'
OPTIONS: Any = {"model": "tiny", "input": "x", "tools": TOOLS, "temperature": 0}


@pytest.fixture
async def http(routers: LocalRouters, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    save_tokenizer(HERMES, tmp_path)
    config = AppConfig(target_model=str(tmp_path), served_model_name="tiny", stream_interval_s=0)
    async with make_client(await make_app(config, routers)) as client:
        yield client


@pytest.fixture
def sdk(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return make_sdk(http)


async def test_a_required_call_is_an_item(sdk: openai.AsyncOpenAI) -> None:
    for choice in ("required", {"type": "function", "name": "clock"}):
        tool = {"type": "function", "name": "clock", "parameters": {"type": "object", "maxProperties": 0}}
        options: Any = {**OPTIONS, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        response = await sdk.responses.create(**options, max_output_tokens=300)
        (call,) = response.output
        assert (call.type, response.status) == ("function_call", "completed")
        assert call.type == "function_call"
        assert (call.name, call.status, response.output_text) == ("clock", "completed", "")
        assert call.call_id.startswith("call_")
        assert response.tools[0].type == "function"
        assert response.tool_choice == choice or response.tool_choice.model_dump(exclude_none=True) == choice  # type: ignore[union-attr]
        events = [event async for event in await sdk.responses.create(**options, max_output_tokens=300, stream=True)]
        types = [event.type.removeprefix("response.") for event in events]
        assert types[:3] == ["created", "in_progress", "output_item.added"]
        assert set(types[3:-3]) == {"function_call_arguments.delta"}
        assert types[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        last: Any = events[-1]
        (streamed,) = last.response.output
        assert "".join(deltas) == streamed.arguments == call.arguments


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Well.", ["message"]),
        (CALL, ["function_call"]),
        (f"Well.\n{CALL}\n{CALL}", ["message", "function_call", "function_call"]),
        (f"{CALL} So.", ["function_call", "message"]),
    ],
)
async def test_text_and_calls_are_items_in_their_order(
    sdk: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, text: str, kinds: list[str]
) -> None:
    make = ResponsesRequest.to_chat
    says = StructuredOutputs(choice=[text])
    monkeypatch.setattr(
        ResponsesRequest, "to_chat", lambda request: make(request).model_copy(update={"structured_outputs": says})
    )
    whole = await sdk.responses.create(**OPTIONS)
    assert [item.type for item in whole.output] == kinds
    arguments = [item.arguments for item in whole.output if item.type == "function_call"]
    assert arguments == ['{"zone": "a } b"}'] * kinds.count("function_call")
    async with sdk.responses.stream(**OPTIONS) as stream:
        events = [event async for event in stream]
    last: Any = events[-1]
    assert [item.type for item in last.response.output] == kinds
    ids = [item.id for item in last.response.output]
    assert len(set(ids)) == len(ids)
    for index, item in enumerate(last.response.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert (mine[0].type, mine[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert {event.item_id for event in mine if hasattr(event, "item_id")} == {item.id}
    assert last.response.output_text == whole.output_text


async def test_log_probabilities_come_with_the_text(sdk: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "tiny", "input": "x", "temperature": 0, "max_output_tokens": 5, "top_logprobs": 2}
    silent = await sdk.responses.create(**options)
    assert silent.output[0].content[0].logprobs == []  # type: ignore[union-attr]
    options["include"] = ["message.output_text.logprobs"]
    whole = await sdk.responses.create(**options)
    shown: Any = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert "".join(entry.token for entry in shown) == whole.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in shown)
    events = [event async for event in await sdk.responses.create(**options, stream=True)]
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in shown]
    (begun,) = (event for event in events if event.type == "response.content_part.added")
    assert (begun.part.text, begun.part.logprobs) == ("", [])  # type: ignore[union-attr]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [entry.logprob for entry in done.logprobs] == [entry.logprob for entry in shown]
