"""A responses request is a chat completion with other names."""

from typing import Any

import pytest

from deployments.openai.responses.request import ResponsesRequest, with_responses_names
from engine.errors import PromptTooLongError, RequestError

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def chat(**fields: Any) -> dict[str, Any]:
    return ResponsesRequest.model_validate({"input": "a", **fields}).to_chat().model_dump(exclude_none=True)


def test_a_text_is_what_the_user_says() -> None:
    assert chat(instructions="b")["messages"] == [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_output_tokens": 3}, {"max_completion_tokens": 3}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"top_logprobs": 2}, {"logprobs": False}),
        ({"tools": [TOOL], "tool_choice": "required"}, {"tool_choice": "required"}),
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


def test_log_probabilities_are_not_available_with_tools() -> None:
    with pytest.raises(RequestError) as error:
        chat(tools=[TOOL], include=["message.output_text.logprobs"])
    assert error.value.param == "include"


def test_an_error_has_the_names_of_this_request() -> None:
    error = with_responses_names(PromptTooLongError("max_completion_tokens is 9, messages has 5", "messages"))
    assert (str(error), error.param) == ("max_output_tokens is 9, input has 5", "input")
    assert isinstance(error, PromptTooLongError)
