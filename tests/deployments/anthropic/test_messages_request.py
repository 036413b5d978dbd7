"""A request in Anthropic's form is a chat completion with other names; what it cannot say is refused by name."""

from typing import Any

import httpx
import pytest

from deployments.anthropic.messages_request import CountTokensRequest, MessagesRequest
from deployments.openai.conversation_fields import MAX_MESSAGES
from deployments.openai.sampling_fields import CommonRequest
from engine.errors import RequestError

USER = {"role": "user", "content": "a"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def chat(**fields: Any) -> dict[str, Any]:
    request = MessagesRequest.model_validate({"messages": [USER], "max_tokens": 3, **fields})
    return request.to_chat().model_dump(exclude_none=True, by_alias=True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"max_tokens": 3, "messages": [USER], "tools": None, "chat_template_kwargs": None, "stream": None}),
        ({"system": "b"}, {"messages": [{"role": "system", "content": "b"}, USER]}),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        (
            {"tools": [TOOL]},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tool_choice": "auto", "parallel_tool_calls": True}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tools": [], "tool_choice": {"type": "auto"}}, {"tool_choice": None}),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tool_choice": "required", "parallel_tool_calls": True}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        ),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
        (
            {"output_config": {"effort": "high"}},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "string"}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}},
        ),
        ({"messages": [USER]}, {"add_generation_prompt": True, "continue_final_message": False}),
        (
            {"messages": [USER, {"role": "assistant", "content": "b"}]},
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    ],
)
def test_a_field_has_another_name(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    request = chat(**fields)
    assert {name: request.get(name) for name in expected} == expected


def test_fields_that_all_apis_have_keep_their_names() -> None:
    shared = {
        "model": "tiny",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 1,
        "stream": True,
        "speculative": {"enabled": False},
        "cache_salt": "s",
        "priority": 1,
    }
    assert shared.keys() == CommonRequest.model_fields.keys()
    request = chat(**shared)
    assert {name: request[name] for name in shared} == shared


def test_claude_codes_billing_header_is_in_no_prompt() -> None:
    system = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=1;", "a", "b")]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(system=system)["messages"] == [{"role": "system", "content": parts}, USER]
    assert chat(system=system[:1])["messages"] == [USER]


def test_results_are_messages_of_their_own_and_too_many_are_refused() -> None:
    blocks = [{"type": "tool_result", "tool_use_id": "1"}] * (MAX_MESSAGES + 1)
    request = CountTokensRequest.model_validate({"messages": [{"role": "user", "content": blocks}]})
    with pytest.raises(RequestError, match="messages holds 1,025") as caught:
        request.to_chat()
    assert caught.value.param == "messages"


async def test_an_answer_goes_on_from_the_last_message(client: httpx.AsyncClient) -> None:
    body = {"max_tokens": 8, "temperature": 0}
    begun = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Sure"}]}]
    message = (await client.post("/v1/messages", json={**body, "messages": begun})).json()
    chat = await client.post(
        "/v1/chat/completions",
        json={
            **body,
            "messages": [USER, {"role": "assistant", "content": "Sure"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    )
    assert message["content"][0]["text"] == chat.json()["choices"][0]["message"]["content"]
    prompt = (await client.post("/v1/messages/count_tokens", json={"messages": begun})).json()["input_tokens"]
    assert prompt == chat.json()["usage"]["prompt_tokens"]
