from typing import Any

import pytest
from pydantic import ValidationError

from deployments.openai.messages import ChatMessage, InputMessage

CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "a"}, "a"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ""),
        ({"role": "tool", "content": "12", "tool_call_id": "c"}, "12"),
    ],
)
def test_the_content_is_one_text(message: dict[str, Any], text: str) -> None:
    assert ChatMessage.model_validate(message).text() == text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": "a", "tool_calls": [CALL]},
        {"role": "user", "content": "a", "tool_call_id": "c"},
        {"role": "tool", "content": "a"},
    ],
)
def test_calls_and_their_results_belong_to_their_roles(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatMessage.model_validate(message)


def test_an_earlier_answer_of_responses_becomes_a_chat_message() -> None:
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    answer = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [part, part]}
    assert InputMessage.model_validate(answer).to_chat() == ChatMessage(role="assistant", content="aa")
