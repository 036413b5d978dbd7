"""/v1/messages through the official client: the text of a chat completion, in Anthropic's shape."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.anthropic.messages_request import MessagesRequest
from tests.deployments.anthropic.clients import official
from tests.deployments.conftest import client_of, make_sdk
from tests.deployments.fakes import LocalRouters
from tests.deployments.requests import says
from tests.deployments.templates import THINKING

USER: Any = [{"role": "user", "content": "hello"}]
BODY: Any = {"model": "tiny", "messages": USER, "max_tokens": 8}
GREEDY: Any = {**BODY, "extra_body": {"temperature": 0}}
TOOLS: Any = [{"name": "clock", "description": "the time", "input_schema": {"type": "object", "maxProperties": 0}}]


@pytest.fixture
async def calling(routers: LocalRouters, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(THINKING, routers, tmp_path) as client:
        yield client


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
    says(monkeypatch, MessagesRequest, "")
    message = await official(calling).messages.create(**BODY)
    async with official(calling).messages.stream(**BODY) as stream:
        final = await stream.get_final_message()
    assert (message.content, message.stop_reason) == (final.content, final.stop_reason) == ([], "end_turn")


@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"zone": "a', {"zone": "a"}), ('{"zone": oops}', '{"zone": oops}')]
)
async def test_a_call_that_is_no_json_is_sent_as_it_is(
    calling: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, arguments: str, expected: Any
) -> None:
    says(monkeypatch, MessagesRequest, f'<tool_call>\n{{"name": "clock", "arguments": {arguments}')
    body = {**BODY, "tools": TOOLS, "max_tokens": 300}
    (call,) = (await calling.post("/v1/messages", json=body)).json()["content"]
    assert call["input"] == expected
    async with official(calling).messages.stream(**body) as stream:  # whose client fails at wrong JSON
        (streamed,) = (await stream.get_final_message()).content
    assert streamed.input == (expected if isinstance(expected, str) else {})  # type: ignore[union-attr]
    history = [*USER, {"role": "assistant", "content": [call]}, *USER]  # as clients send it back
    assert (await calling.post("/v1/messages", json={**BODY, "messages": history})).status_code == 200


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
