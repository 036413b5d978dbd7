from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from deployments.openai.messages import ChatMessage, message_of

CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: TypeAdapter[ChatMessage] = TypeAdapter(ChatMessage)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "a"}, "a"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}, "a"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ""),
        ({"role": "assistant", "content": "a", "tool_calls": []}, "a"),
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": "a", "annotations": [], "reasoning_content": "b", "refusal": None}, "a"),
        ({"role": "tool", "content": "12", "tool_call_id": "c"}, "12"),
    ],
)
def test_the_content_is_one_text(message: dict[str, Any], text: str) -> None:
    assert MESSAGES.validate_python(message).text() == text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "system", "content": None},
        {"role": "user", "content": "a", "tool_calls": [CALL]},
        {"role": "user", "content": "a", "tool_call_id": "c"},
        {"role": "tool", "content": "a"},
        {"role": "tool", "tool_call_id": "c"},
        {"role": "judge", "content": "a"},
    ],
)
def test_calls_and_their_results_belong_to_their_roles(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MESSAGES.validate_python(message)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_message_can_be_made_of_a_role_and_a_text(role: Any) -> None:
    message = message_of(role, "a")
    assert (message.role, message.text()) == (role, "a")
    assert MESSAGES.validate_python(message.model_dump(exclude_none=True)) == message
