"""A responses request is a chat completion with other names, and its items are a conversation."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from deployments.anthropic.messages_request import MessagesRequest
from deployments.openai.conversation_fields import ChatMessage
from deployments.openai.responses_request import Item, ResponsesRequest, conversation, renamed
from engine.errors import PromptTooLongError, RequestError

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
MESSAGES: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


def call(call_id: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": "fc",
        "status": "completed",
        "call_id": call_id,
        "name": "f",
        "arguments": "{}",
    }


def chat_call(call_id: str) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": "f", "arguments": "{}"}}


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
PART = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
HIDDEN = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "x"}
SHOWN = {**HIDDEN, "content": [{"type": "reasoning_text", "text": text} for text in "hm"]}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "12"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (
            [{"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [PART, PART]}],
            [{"role": "assistant", "content": "aa"}],
        ),
        (  # thoughts belong to the answer after them
            [
                {**USER, "provider_specific_fields": {}},
                HIDDEN,
                ANSWER,
                SHOWN,
                call("1"),
                call("2"),
                SHOWN,
                USER,
                ANSWER,
            ],
            [
                *(USER, ANSWER),
                {"role": "assistant", "reasoning_content": "hm", "tool_calls": [chat_call("1"), chat_call("2")]},
                *(USER, ANSWER),
            ],
        ),
        ([SHOWN, ANSWER], [{**ANSWER, "reasoning_content": "hm"}]),
        (  # calls belong to the answer that made them
            [
                *(USER, ANSWER, call("1"), call("2"), RESULT),
                {**RESULT, "call_id": "2", "output": [{"type": "input_text", "text": "13"}]},
                *(call("3"), {**RESULT, "call_id": "3"}),
            ],
            [
                USER,
                {**ANSWER, "tool_calls": [chat_call("1"), chat_call("2")]},
                {"role": "tool", "tool_call_id": "1", "content": "12"},
                {"role": "tool", "tool_call_id": "2", "content": "13"},
                {"role": "assistant", "tool_calls": [chat_call("3")]},
                {"role": "tool", "tool_call_id": "3", "content": "12"},
            ],
        ),
    ],
)
def test_items_are_messages(items: Any, messages: Any) -> None:
    assert conversation(ITEMS.validate_python(items)) == MESSAGES.validate_python(messages)


def test_thoughts_alone_are_no_conversation() -> None:
    with pytest.raises(RequestError, match="nothing but earlier thoughts") as caught:
        ResponsesRequest.model_validate({"input": [HIDDEN]}).to_chat()
    assert caught.value.param == "input"


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "strict": True, **FUNCTION}


def chat(**fields: Any) -> dict[str, Any]:
    return ResponsesRequest.model_validate({"input": "a", **fields}).to_chat().model_dump(exclude_none=True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_output_tokens": 3}, {"max_completion_tokens": 3}),
        ({"instructions": "b"}, {"messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"top_logprobs": 2}, {"logprobs": False}),
        (
            {"tools": [TOOL], "tool_choice": "required"},  # without `strict`
            {"tool_choice": "required", "tools": [{"type": "function", "function": FUNCTION}]},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ({"tools": [TOOL], "parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"temperature": 0.5, "seed": 1, "cache_salt": "s"}, {"temperature": 0.5, "seed": 1, "cache_salt": "s"}),
    ],
)
def test_a_field_has_another_name(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    request = chat(**fields)
    assert {name: request.get(name) for name in expected} == expected
    assert "top_logprobs" in expected or "top_logprobs" not in request


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_openais_default_choice_needs_no_tools(choice: str) -> None:
    assert "tool_choice" not in chat(tool_choice=choice)
    assert chat(tool_choice=choice, tools=[TOOL])["tool_choice"] == choice


def test_an_error_has_the_names_of_this_request() -> None:
    error = renamed(
        PromptTooLongError("max_completion_tokens is 9, messages has 5", "messages"), ResponsesRequest.CHAT_FIELDS
    )
    assert (str(error), error.param) == ("max_output_tokens is 9, input has 5", "input")
    assert isinstance(error, PromptTooLongError)
    left_out = RequestError("the chat template leaves out the text of messages[2] (role tool)", "messages")
    for fields, name in ((ResponsesRequest.CHAT_FIELDS, "input"), (MessagesRequest.CHAT_FIELDS, "messages")):
        assert str(renamed(left_out, fields)) == f"the chat template leaves out the text of {name} (role tool)"
