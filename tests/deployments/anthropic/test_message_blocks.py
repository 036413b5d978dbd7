"""Messages and blocks in Anthropic's form are a conversation."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from deployments.anthropic.message_blocks import Turn, conversation
from deployments.openai.conversation_fields import ChatMessage

TURNS: TypeAdapter[list[Turn]] = TypeAdapter(list[Turn])
MESSAGES: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, "cache_control": {"type": "ephemeral"}, "citations": None}


def result(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


def use(call_id: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": arguments}


def call(call_id: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": "f", "arguments": arguments}}


def shown(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) | {"content": message.text()} for message in messages]


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"role": "user", "content": "a"}, [{"role": "user", "content": "a"}]),
        ({"role": "user", "content": [text("a"), text("b")]}, [{"role": "user", "content": "ab"}]),
        ({"role": "system", "content": [text("a")]}, [{"role": "system", "content": "a"}]),
        (
            {
                "role": "user",
                "content": [result("1", content="x"), result("2", content=[text("y"), text("z")]), text("a")],
            },
            [
                {"role": "tool", "tool_call_id": "1", "content": "x"},
                {"role": "tool", "tool_call_id": "2", "content": "yz"},
                {"role": "user", "content": "a"},
            ],
        ),
        ({"role": "user", "content": [result("1")]}, [{"role": "tool", "tool_call_id": "1", "content": ""}]),
        ({"role": "assistant", "content": "a"}, [{"role": "assistant", "content": "a"}]),
        ({"role": "assistant", "content": []}, [{"role": "assistant", "content": ""}]),
        (
            {"role": "assistant", "content": [text("a"), use("1", {"x": "é"}), use("2", "oops")]},
            [{"role": "assistant", "content": "a", "tool_calls": [call("1", '{"x": "é"}'), call("2", "oops")]}],
        ),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "s"},
                    text("a"),
                ],
            },
            [{"role": "assistant", "content": "a", "reasoning_content": "hm"}],
        ),
    ],
)
def test_a_turn_becomes_chat_messages(turn: Any, expected: Any) -> None:
    assert shown(conversation(TURNS.validate_python([turn]))) == shown(MESSAGES.validate_python(expected))
