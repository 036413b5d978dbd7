"""/v1/messages through the official client: the text of a chat completion, in Anthropic's shape."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from deployments.anthropic.messages_request import MessagesRequest
from deployments.openai.structured_output import StructuredOutputs
from deployments.openai.tools import MessageForm
from engine.errors import TargetError
from tests.deployments.anthropic.clients import official
from tests.deployments.conftest import client_of, make_sdk
from tests.deployments.fakes import LocalRouters
from tests.deployments.templates import THINKING

USER: Any = [{"role": "user", "content": "hello"}]
BODY: Any = {"model": "tiny", "messages": USER, "max_tokens": 8}
OPTIONS: Any = {**BODY, "extra_body": {"seed": 7}}
GREEDY: Any = {**BODY, "extra_body": {"temperature": 0}}
TOOLS: Any = [{"name": "clock", "description": "the time", "input_schema": {"type": "object", "maxProperties": 0}}]
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "a } b"}}\n</tool_call>'


@pytest.fixture
async def calling(routers: LocalRouters, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(THINKING, routers, tmp_path) as client:
        yield client


def says(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make the model say this."""
    monkeypatch.setattr(MessageForm, "thoughts_after", lambda form, prompt: None)  # the text is all that is said
    make, only = MessagesRequest.to_chat, StructuredOutputs(choice=[text])
    monkeypatch.setattr(
        MessagesRequest, "to_chat", lambda request: make(request).model_copy(update={"structured_outputs": only})
    )


@pytest.mark.parametrize("temperature", [0, 0.9])
async def test_a_message_says_what_a_chat_completion_says(
    client: httpx.AsyncClient, sdk: openai.AsyncOpenAI, temperature: float
) -> None:
    chat = await sdk.chat.completions.create(model="tiny", messages=USER, max_tokens=8, temperature=temperature, seed=7)
    options = {**BODY, "extra_body": {"temperature": temperature, "seed": 7}}
    message = await official(client).messages.create(**options)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": chat.choices[0].message.content}]
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert (message.stop_reason, message.stop_sequence, message.id[:4]) == ("max_tokens", None, "msg_")
    assert chat.usage is not None
    assert message.usage.output_tokens == 8
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    async with official(client).messages.stream(**options) as stream:
        assert "".join([text async for text in stream.text_stream]) == chat.choices[0].message.content
        final = await stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in message.content]
    assert (final.type, final.role, final.stop_reason) == ("message", "assistant", "max_tokens")
    assert final.usage.cache_read_input_tokens  # the prompt has been seen
    assert final.usage.output_tokens == 8


async def test_a_stream_has_anthropics_events_in_order(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/messages?beta=true", json={**BODY, "stream": True})
    fields = [dict(line.split(": ", 1) for line in event.split("\n")) for event in response.text.split("\n\n")[:-1]]
    events = [json.loads(event["data"]) for event in fields]
    types = [event["type"] for event in events]
    assert [event["event"] for event in fields] == types
    assert types[:2] == ["message_start", "content_block_start"]
    assert set(types[2:-3]) == {"content_block_delta"}
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


async def test_a_stop_sequence_is_named(client: httpx.AsyncClient) -> None:
    whole = await official(client).messages.create(**GREEDY)
    text = whole.content[0].to_dict()["text"]
    stopped = {**GREEDY, "stop_sequences": ["never", text[3:5]]}
    message = await official(client).messages.create(**stopped)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[3:5])
    assert message.content[0].to_dict()["text"] == text[: text.index(text[3:5])]
    async with official(client).messages.stream(**stopped) as stream:
        final = await stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", text[3:5])
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in message.content]


async def test_an_answer_that_ends_at_once_has_no_block(calling: httpx.AsyncClient, monkeypatch: Any) -> None:
    says(monkeypatch, "")
    message = await official(calling).messages.create(**OPTIONS)
    async with official(calling).messages.stream(**OPTIONS) as stream:
        final = await stream.get_final_message()
    assert (message.content, message.stop_reason) == (final.content, final.stop_reason) == ([], "end_turn")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "clock"}])
async def test_a_required_call_is_a_block(calling: httpx.AsyncClient, choice: Any) -> None:
    options = {
        **OPTIONS,
        "tools": TOOLS,
        "max_tokens": 300,
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    message = await official(calling).messages.create(**options)
    async with official(calling).messages.stream(**options) as stream:
        final = await stream.get_final_message()
    for answer in (message, final):
        (call,) = answer.content
        assert call.type == "tool_use"
        assert (call.name, call.input, answer.stop_reason) == ("clock", {}, "tool_use")


@pytest.mark.parametrize(
    ("text", "kinds", "reason"),
    [
        ("Well.", ["text"], "end_turn"),
        ("Well, <tool", ["text"], "end_turn"),
        (CALL, ["tool_use"], "tool_use"),
        (f"Well.\n{CALL}\n{CALL.replace('a }', 'c }')}", ["text", "tool_use", "tool_use"], "tool_use"),
        (f"{CALL} So.", ["tool_use", "text"], "tool_use"),
        (f"<think>\nHm.\n</think>\n\nWell.\n{CALL}", ["thinking", "text", "tool_use"], "tool_use"),
    ],
)
async def test_text_and_calls_are_blocks_in_their_order(
    calling: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, text: str, kinds: list[str], reason: str
) -> None:
    says(monkeypatch, text)
    options = {**OPTIONS, "tools": TOOLS, "max_tokens": 300}
    whole = await official(calling).messages.create(**options)
    assert [block.type for block in whole.content] == kinds
    assert [block.thinking for block in whole.content if block.type == "thinking"] == ["Hm."] * kinds.count("thinking")
    inputs = [block.input for block in whole.content if block.type == "tool_use"]
    assert inputs == [{"zone": "a } b"}, {"zone": "c } b"}][: kinds.count("tool_use")]
    assert whole.stop_reason == reason
    async with official(calling).messages.stream(**options) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_message()
    assert [event.index for event in events if event.type == "content_block_start"] == list(range(len(kinds)))
    assert [event.index for event in events if event.type == "content_block_stop"] == list(range(len(kinds)))
    without_ids = [[block.to_dict() | {"id": None} for block in answer.content] for answer in (whole, final)]
    assert without_ids[0] == without_ids[1]
    assert final.stop_reason == reason


@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"zone": "a', {"zone": "a"}), ('{"zone": oops}', '{"zone": oops}')]
)
async def test_a_call_that_is_no_json_is_sent_as_it_is(
    calling: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, arguments: str, expected: Any
) -> None:
    says(monkeypatch, f'<tool_call>\n{{"name": "clock", "arguments": {arguments}')
    body = {**BODY, "tools": TOOLS, "max_tokens": 300}
    (call,) = (await calling.post("/v1/messages", json=body)).json()["content"]
    assert call["input"] == expected
    async with official(calling).messages.stream(**body) as stream:  # whose client fails at wrong JSON
        (streamed,) = (await stream.get_final_message()).content
    assert streamed.input == (expected if isinstance(expected, str) else {})  # type: ignore[union-attr]
    history = [*USER, {"role": "assistant", "content": [call]}, *USER]  # as clients send it back
    assert (await calling.post("/v1/messages", json={**BODY, "messages": history})).status_code == 200


async def test_counted_tokens_are_those_of_the_prompt(client: httpx.AsyncClient) -> None:
    conversation: Any = {"model": "tiny", "messages": USER, "system": "be brief"}
    counted = await official(client).messages.count_tokens(**conversation)
    usage = (await official(client).messages.create(**conversation, max_tokens=1)).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"model": "claude-opus-4-8"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 600}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
async def test_an_error_has_anthropics_form(client: httpx.AsyncClient, fields: Any, error: Any, kind: str) -> None:
    with pytest.raises(error) as raised:
        await official(client).messages.create(**{**OPTIONS, **fields})
    assert raised.value.body["type"] == "error"
    assert set(raised.value.body["error"]) == {"type", "message"}
    assert raised.value.body["error"]["type"] == kind
    assert raised.value.body["request_id"]


async def test_an_error_after_the_first_byte_is_an_event(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    routers.error = TargetError("the target is gone")
    response = await client.post("/v1/messages", json={**BODY, "stream": True})
    name, data = response.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"] == {
        "type": "overloaded_error",
        "message": "the target is gone",
    }
    with pytest.raises(anthropic.APIStatusError):
        async with official(client).messages.stream(**OPTIONS) as stream:
            await stream.get_final_message()


CLAUDE_CODES = """{
  "model": "tiny", "max_tokens": 8, "stream": true, "metadata": {"user_id": "user_1_account__session_2"},
  "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"},
  "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
  "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
  "system": [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.198; cc_entrypoint=cli; cch=NONCE;"},
    {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    {"type": "text", "text": "\\nBe brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
  ],
  "tools": [
    {"name": "Read", "description": "Reads a file.", "eager_input_streaming": true,
     "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}}
  ],
  "messages": [
    {"role": "user", "content": [
      {"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
      {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I look."},
      {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}}]},
    {"role": "user", "content": [
      {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such file", "is_error": true,
       "cache_control": {"type": "ephemeral"}},
      {"type": "text", "text": "<system-reminder>c</system-reminder>\\n"}]}
  ]
}"""
AS_CHAT = """{
  "messages": [
    {"role": "system", "content": "You are Claude Code.\\nBe brief."},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "I look.", "tool_calls": [
      {"id": "toolu_1", "type": "function", "function": {"name": "Read", "arguments": "{\\"path\\": \\"a\\"}"}}]},
    {"role": "tool", "tool_call_id": "toolu_1", "content": "no such file"},
    {"role": "user", "content": "<system-reminder>c</system-reminder>\\n"}
  ],
  "tools": [
    {"type": "function", "function": {"name": "Read", "description": "Reads a file.",
     "parameters": {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}}}
  ]
}"""


async def test_claude_codes_request_is_answered(calling: httpx.AsyncClient) -> None:
    """Its system blocks, tools, thoughts and results as it sends them, with the text of the same chat completion."""
    sampling: Any = {"seed": 3, "temperature": 1}

    async def events(nonce: str) -> list[Any]:
        request = json.loads(CLAUDE_CODES.replace("NONCE", nonce))
        stream = await official(calling).beta.messages.create(**request, extra_body=sampling)
        return [event async for event in stream]

    text = "".join(event.delta.text for event in await events("36ee5") if event.type == "content_block_delta")
    (usage,) = [event.usage for event in await events("0aaa9") if event.type == "message_delta"]
    assert usage.input_tokens <= 16  # the rest was cached
    chat = await make_sdk(calling).chat.completions.create(
        model="tiny", max_tokens=8, **sampling, **json.loads(AS_CHAT)
    )
    assert text == chat.choices[0].message.content
