"""/v1/responses through the official client: the text of a chat completion, in the newer shape."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.openai.responses_request import ResponsesRequest
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


@pytest.fixture
async def calling(routers: LocalRouters, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(HERMES, routers, tmp_path) as client:
        yield make_sdk(client)


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
    types = [event.type.removeprefix("response.") for event in events]
    begun, ended = types.index("reasoning_text.delta"), types.index("reasoning_text.done")
    assert types[begun - 2 : begun] == ["output_item.added", "content_part.added"]
    after = ["content_part.done", "output_item.done", "output_item.added", "content_part.added", "output_text.delta"]
    assert types[ended + 1 : ended + 6] == after
    assert events[ended].text == events[ended + 1].part.text == events[ended + 2].item.content[0].text == said


async def test_log_probabilities_come_with_the_text(calling: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "tiny", "input": "x", "temperature": 0, "max_output_tokens": 5, "top_logprobs": 2}
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
