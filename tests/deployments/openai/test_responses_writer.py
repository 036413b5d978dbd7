"""/v1/responses through the official client: the text of a chat completion, in the newer shape."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.openai.responses_request import ResponsesRequest
from deployments.openai.structured_output import StructuredOutputs
from engine.errors import TargetError
from tests.deployments.conftest import client_of, make_sdk
from tests.deployments.fakes import LocalRouters
from tests.deployments.templates import HERMES
from tests.deployments.thinking import BIAS, ONE

OPTIONS: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}


async def chat_text(sdk: openai.AsyncOpenAI, messages: Any) -> str:
    chat = await sdk.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    return chat.choices[0].message.content or ""


async def test_a_response_says_what_a_chat_completion_says(sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.responses.create(input="hello", **OPTIONS)
    assert response.output_text == await chat_text(sdk, [{"role": "user", "content": "hello"}])
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    assert response.usage.total_tokens == response.usage.input_tokens + 8
    assert (response.object, response.max_output_tokens, response.temperature) == ("response", 8, 0)
    assert response.id.startswith("resp_")


async def test_instructions_and_earlier_answers_are_part_of_the_conversation(sdk: openai.AsyncOpenAI) -> None:
    first = await sdk.responses.create(input="a", instructions="be brief", metadata={"key": "value"}, **OPTIONS)
    assert first.metadata == {"key": "value"}
    assert first.instructions == "be brief"
    user: Any = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
    again: Any = {"role": "user", "content": "b"}
    # What the client got goes back as it came.
    history: Any = [user, *(item.model_dump() for item in first.output), again]
    second = await sdk.responses.create(input=history, instructions="be brief", **OPTIONS)
    expected = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "b"},
    ]
    assert second.output_text == await chat_text(sdk, expected)


async def test_a_stream_has_openais_events_in_order(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.responses.create(input="hello", **OPTIONS)
    events = [event async for event in await sdk.responses.create(input="hello", stream=True, **OPTIONS)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type.removeprefix("response.") for event in events]
    assert types[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(types[4:-4]) == {"output_text.delta"}
    assert types[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert text == whole.output_text == last.response.output_text
    assert last.response.usage.total_tokens == whole.usage.total_tokens
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


async def test_an_error_event_has_openais_fields(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    routers.error = TargetError("the target is gone")
    response = await client.post("/v1/responses", json={"input": "x", "stream": True})
    name, data, *_ = response.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert set(event) == {"type", "sequence_number", "message", "param", "code"}


TOOLS: Any = [{"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": False}]
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "a } b"}}\n</tool_call>'
CALLING: Any = {"model": "tiny", "input": "x", "tools": TOOLS, "temperature": 0}


@pytest.fixture
async def calling(routers: LocalRouters, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(HERMES, routers, tmp_path) as client:
        yield make_sdk(client)


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
    calling: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, text: str, kinds: list[str]
) -> None:
    make = ResponsesRequest.to_chat
    says = StructuredOutputs(choice=[text])
    monkeypatch.setattr(
        ResponsesRequest, "to_chat", lambda request: make(request).model_copy(update={"structured_outputs": says})
    )
    whole = await calling.responses.create(**CALLING, tool_choice="auto", parallel_tool_calls=False)
    assert (whole.tool_choice, whole.parallel_tool_calls, whole.tools[0].type) == ("auto", False, "function")
    assert [item.type for item in whole.output] == kinds
    arguments = [item.arguments for item in whole.output if item.type == "function_call"]
    assert arguments == ['{"zone": "a } b"}'] * kinds.count("function_call")
    async with calling.responses.stream(**CALLING) as stream:
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


async def test_thoughts_are_an_item_of_their_own(thinking: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    make = ResponsesRequest.to_chat
    monkeypatch.setattr(
        ResponsesRequest, "to_chat", lambda request: make(request).model_copy(update={"logit_bias": BIAS})
    )
    options: Any = {"model": "tiny", "input": "x", "extra_body": {"seed": 1}, "top_logprobs": 0}
    options["text"] = {"format": {"type": "json_schema", "name": "one", "schema": ONE}}
    options["include"] = ["message.output_text.logprobs"]
    sdk = make_sdk(thinking)
    whole: Any = await sdk.responses.create(**options)
    thoughts, message = whole.output
    assert (thoughts.type, message.type) == ("reasoning", "message")
    said = thoughts.content[0].text
    assert said
    assert json.loads(message.content[0].text).keys() == {"a"}
    # A token is a byte, and one ends the thoughts.
    assert whole.usage.output_tokens_details.reasoning_tokens == len(said) + 1
    assert whole.usage.output_tokens == len(said) + 1 + len(message.content[0].text) + 1
    shown = "".join(entry.token for entry in message.content[0].logprobs)
    assert shown.removesuffix("</s>") == message.content[0].text
    events: list[Any] = [event async for event in await sdk.responses.create(**options, stream=True)]
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == said
    types = [event.type.removeprefix("response.") for event in events]
    begun, ended = types.index("reasoning_text.delta"), types.index("reasoning_text.done")
    assert types[begun - 2 : begun] == ["output_item.added", "content_part.added"]
    assert set(types[begun:ended]) == {"reasoning_text.delta"}
    after = ["content_part.done", "output_item.done", "output_item.added", "content_part.added", "output_text.delta"]
    assert types[ended + 1 : ended + 6] == after
    assert [item.content[0].text for item in events[-1].response.output] == [said, message.content[0].text]
    assert events[ended].text == events[ended + 1].part.text == events[ended + 2].item.content[0].text == said


async def test_log_probabilities_come_with_the_text(calling: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "tiny", "input": "x", "temperature": 0, "max_output_tokens": 5, "top_logprobs": 2}
    silent = await calling.responses.create(**options)
    assert silent.output[0].content[0].logprobs == []  # type: ignore[union-attr]
    options["include"] = ["message.output_text.logprobs"]
    whole = await calling.responses.create(**options)
    shown: Any = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert "".join(entry.token for entry in shown) == whole.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in shown)
    events = [event async for event in await calling.responses.create(**options, stream=True)]
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in shown]
    (begun,) = (event for event in events if event.type == "response.content_part.added")
    assert (begun.part.text, begun.part.logprobs) == ("", [])  # type: ignore[union-attr]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [entry.logprob for entry in done.logprobs] == [entry.logprob for entry in shown]
    options["extra_body"] = {"stop": whole.output_text[-2:]}  # whose tokens have no text
    whole = await calling.responses.create(**options)
    events = [event async for event in await calling.responses.create(**options, stream=True)]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    shown = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert len(done.logprobs) == len(shown) > len(whole.output_text)
