"""Input items, and the conversation that they are."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from deployments.openai.messages import ChatMessage
from deployments.openai.responses.items import FunctionTool, Item, conversation

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
MESSAGES: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


def call(call_id: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "status": "completed",
        "call_id": call_id,
        "name": "f",
        "arguments": "{}",
    }


def chat_call(call_id: str) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": "f", "arguments": "{}"}}


def test_an_earlier_answer_becomes_a_chat_message() -> None:
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    answer = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [part, part]}
    expected = MESSAGES.validate_python([{"role": "assistant", "content": "aa"}])
    assert conversation(ITEMS.validate_python([answer])) == expected


def test_calls_belong_to_the_answer_that_made_them() -> None:
    result = {"type": "function_call_output", "call_id": "1", "output": "12"}
    parts = {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "13"}]}
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    items = [user, answer, call("1"), call("2"), result, parts, call("3"), {**result, "call_id": "3"}]
    expected = [
        user,
        {**answer, "tool_calls": [chat_call("1"), chat_call("2")]},
        {"role": "tool", "tool_call_id": "1", "content": "12"},
        {"role": "tool", "tool_call_id": "2", "content": "13"},
        {"role": "assistant", "tool_calls": [chat_call("3")]},
        {"role": "tool", "tool_call_id": "3", "content": "12"},
    ]
    assert conversation(ITEMS.validate_python(items)) == MESSAGES.validate_python(expected)


@pytest.mark.parametrize(
    "item",
    [
        {"role": "tool", "content": "a"},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1"},
        {"type": 1, "role": "user"},
        "a",
    ],
)
def test_other_items_are_refused(item: Any) -> None:
    with pytest.raises(ValidationError):
        ITEMS.validate_python([item])


def test_a_function_is_the_same_as_in_chat_completions() -> None:
    tool = FunctionTool(
        type="function", name="f", description="d", parameters={"type": "object"}, strict=True
    ).to_chat()
    assert (tool.function.name, tool.function.description, tool.function.parameters) == ("f", "d", {"type": "object"})
