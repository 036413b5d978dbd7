"""What a request may not say, at each door: refused by a sentence that names the field, before a Router hears of it.

Some rows are what the suites of vLLM, llama.cpp and SGLang refuse, too.
"""

import json
import math
from typing import Any

import httpx
import pytest

from tests.deployments.fakes import VOCAB_SIZE, LocalRouters

USER: Any = [{"role": "user", "content": "x"}]
IMAGE: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NO_NUMBER: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": math.nan}}}
MOUSE = {"type": "json_schema", "schema": {"type": "mouse"}}
PREDICTION = {"type": "content", "content": "a"}
UNIQUE = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 8},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 8},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": USER, "max_tokens": 3},
    "/tokenize": {"messages": USER},
    "/detokenize": {},
}
OTHER_NAMES = {"/v1/responses": ("messages", "response_format"), "/v1/messages": ("stop_strings", "response_format")}
"""Of fields that these requests do not have."""


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


REFUSED: dict[str, list[tuple[Any, str | None, str]]] = {
    "/v1/completions": [
        ({"prompt": []}, "prompt", ""),
        ({"prompt": [[]] * 10_000}, "prompt.0", ""),  # of many items, the first wrong item
        ({"prompt": ["a"] * 65}, "prompt", ""),
        *(({"stop_token_ids": [7, token]}, "stop_token_ids.1", "") for token in ("1", -1, 2**31, 1.5, True)),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", ""),
        ({"structured_outputs": {"json": {"a": [math.inf]}}}, "structured_outputs.json", ""),
        ({"suffixes": 1}, "suffixes", "is not a field of this request"),
        ({"prompt": ["a", "b"], "prediction": PREDICTION}, "prediction", "only allowed with one prompt; there are 2"),
        ({"speculative": {"fixed": True}, "prediction": PREDICTION}, "prediction", "with speculative.fixed"),
        ({"prediction": PREDICTION | {"content": "a" * 10_000}}, "prediction", "prediction has 10,000 characters"),
        ({"prompt": "a" * 600}, "prompt", ""),
        ({"prompt": "a" * 100_000}, "prompt", ""),
        ({"prompt": "\ud800"}, "", ""),
        ({"\ud800": 1}, "", ""),
        ({"suffix": "x"}, "suffix", ""),
        ({"best_of": 2}, "best_of", ""),
        ({"max_tokens": 0}, "max_tokens", ""),
        ({"max_tokens": 510}, "max_tokens", ""),
        ({"min_tokens": 9}, "min_tokens", ""),
        ({"n": 9}, "n", ""),
        ({"n": 2, "speculative": {"trace": True}}, "n", ""),
        ({"stop_token_ids": [259]}, "stop_token_ids", "259, the model's ids end at 258"),
        ({"logit_bias": {"259": 1}}, "logit_bias", "0 to 258: '259'"),
        ({"logit_bias": {"bad1": 5, "bad2": 2}}, "logit_bias", "'bad1', 'bad2'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", ""),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ""),
        ({"speculative": {"num_speculative_tokens": 5}}, "speculative.num_speculative_tokens", ""),
        ({"speculative": {"enabled": False, "num_speculative_tokens": 2}}, "speculative.num_speculative_tokens", ""),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "has regex, choice"),
        ({"structured_outputs": {"grammar": "hello"}}, "structured_outputs.grammar", "neither Lark nor GBNF"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"json": {"type": "mouse"}}}, "structured_outputs.json", "mouse"),
        ({"structured_outputs": {"json": {"$ref": "http://localhost/"}}}, "structured_outputs.json", "not present"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex", "70,000 characters, at most"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens", "cannot be combined with a grammar"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "cannot be combined with a grammar"),
    ],
    "/v1/chat/completions": [
        ({"messages": []}, "messages", ""),
        ({"messages": IMAGE}, None, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", ""),
        ({"messages": [{"role": "user", "content": "hello " * 84}]}, "messages", "512"),
        ({"max_tokens": 1200}, "max_tokens", "1,200"),
        ({"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens 5"),
        ({"top_logprobs": 2}, "top_logprobs", ""),
        ({"tool_choice": "auto"}, "tool_choice", ""),
        ({"tools": TOOLS}, "tools", ""),
        ({"tool_choice": "required"}, "tool_choice", ""),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", ""),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", ""),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", ""),
        ({"messages": USER * 1025}, "messages", ""),
        ({"messages": [{"role": "x"}] * 5000}, "messages.0.role", ""),
        ({"messages": [{"role": "user", "content": [1] * 60_000}]}, "messages.0.content.0", ""),
        ({"tools": [NO_NUMBER]}, "tools.0.function.parameters", ""),
        ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id", ""),
        ({"messages": [*USER, {"role": "user"}]}, "messages.1.content", ""),
        ({"cache_salt": ""}, "cache_salt", ""),
        ({"length_penalty": 1.5}, "length_penalty", ""),
        ({"best_of": True}, "best_of", ""),
        ({"use_beam_search": True}, "use_beam_search", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "with a response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": UNIQUE}},
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
    ],
    "/v1/responses": [
        ({"max_output_tokens": 600}, "max_output_tokens", ""),
        ({"previous_response_id": "resp_1"}, "previous_response_id", ""),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None, ""),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input", ""),
        ({"input": "x" * 2000}, "input", ""),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", ""),
        ({"background": True}, "background", ""),
        ({"speculative": {"trace": True}}, "speculative.trace", ""),
        ({"conversation": "conv_1"}, "conversation", ""),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", ""),
        ({"model": "other"}, "model", ""),
        ({"input": [{"role": "tool", "content": "a"}]}, None, ""),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, None, ""),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id", ""),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input.0.output", ""),
        ({"input": ["a"]}, None, ""),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", ""),
        (
            {"tools": [{"type": "function", "name": "f"}], "include": ["message.output_text.logprobs"]},
            "include",
            "not available with tools",
        ),
        ({"text": {"format": {"name": "n", **MOUSE}}}, "text.format.schema", ""),
        ({"text": {"format": {"name": "n", **MOUSE, "schema": {"x": math.inf}}}}, "text.format.schema", ""),
        ({"tools": [{"type": "function", **NO_NUMBER["function"]}], "tool_choice": "none"}, "tools.0.parameters", ""),
    ],
    "/v1/messages": [
        ({"max_tokens": None}, None, "max_tokens"),
        ({"max_tokens": 0}, None, "max_tokens is 0"),
        (part(type="image", source={"type": "url", "url": "x"}), None, "messages.0.content.0.type is 'image'"),
        (part(type="document", source={}), None, "messages.0.content.0.type is 'document'"),
        (part(type="tool_use", id="1", name="f", input={}), None, "messages.0.content.0.type is 'tool_use'"),
        (part(type="tool_result", tool_use_id="1", content=[{"type": "image"}]), None, "content.0.content.0.type"),
        ({"messages": [{"role": "tool", "content": "a"}]}, None, "messages.0.role is 'tool'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, None, "content.0.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, None, "tools.0.type is 'web_search_20250305'"),
        ({"tool_choice": {"type": "any"}}, None, "tool_choice is only allowed with tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, None, "tool_choice names 'g'"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            None,
            "context_management.edits.0.type is 'clear_tool_uses_20250919'",
        ),
        ({"output_config": {"format": MOUSE}}, None, "output_config.format.schema"),
        ({"stop_sequences": ["a"] * 5}, None, "stop_sequences"),
        ({"mcp_servers": [{"type": "url"}]}, None, "mcp_servers"),
        ({"speculative": {"trace": True}}, None, "speculative.trace is not available here"),
        ({"n": 2}, None, "n is not a field"),
        ({"max_tokens": 510}, None, "max_tokens is 510, messages has"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, None, "the chat template refuses the messages"),
    ],
}
REFUSED["/tokenize"] = [({"messages": None}, "prompt", ""), ({"prompt": "a"}, "prompt", "")]
REFUSED["/tokenize"] += [({"tools": [NO_NUMBER]}, "tools.0.function.parameters", "")]
REFUSED["/detokenize"] = [({"tokens": [VOCAB_SIZE]}, "tokens", ""), ({"tokens": [1] * 513}, "tokens", "")]
REFUSED["/detokenize"] += [({"tokens": [-1] * 100_000}, "tokens.0", "")]
CONVERSATION: list[tuple[Any, str | None, str]] = [
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", ""),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", ""),
    ({"chat_template_kwargs": {"tone": math.nan}}, "chat_template_kwargs", ""),
    ({"chat_template_kwargs": {"tone": "<|end|>"}}, "chat_template_kwargs", ""),
    ({"chat_template_kwargs": {"tone": "x" * 10_000}}, "chat_template_kwargs", ""),
    ({"reasoning_effort": "some"}, "reasoning_effort", ""),
    ({"chat_template": "x"}, "chat_template", ""),
]
ROWS = [(path, *row) for path, rows in REFUSED.items() for row in rows]
ROWS += [(path, *row) for path in ("/v1/chat/completions", "/tokenize") for row in CONVERSATION]


@pytest.mark.parametrize(("path", "fields", "param", "words"), ROWS)
async def test_what_a_request_may_not_say_is_refused_by_name(
    client: httpx.AsyncClient, routers: LocalRouters, path: str, fields: Any, param: str | None, words: str
) -> None:
    """An empty `param` is null; None is any."""
    body = json.dumps({**BODIES[path], **fields})
    response = await client.post(path, content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400), error
    assert param is None or error["param"] == (param or None), error
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert words in error["message"]
    assert not any(name in error["message"] for name in OTHER_NAMES.get(path, ()))
    assert routers.last is None


@pytest.mark.parametrize("number", [math.nan, math.inf, 10**1000, -(10**1000)], ids=["nan", "inf", "huge", "-huge"])
async def test_numbers_of_any_size_are_refused_by_name(client: httpx.AsyncClient, number: float) -> None:
    fields = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "logprobs"), number)
    fields |= {"best_of": number, "prompt_logprobs": number, "stop_token_ids": [number], "logit_bias": {"1": number}}
    for name, value in fields.items():
        body = json.dumps({"prompt": "a", name: value})
        response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        error = response.json()["error"]
        assert (response.status_code, error["param"].partition(".")[0]) == (400, name)
        assert len(error["message"]) < 1500


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "source",
    [
        {"regex": "(?P<"},
        {"grammar": "start: %import common.WORD"},
        {"grammar": 'start: %json {"$ref": "file:///etc/passwd"}'},
        {"grammar": "start: @other"},
        {"json": {"$ref": "http://example.com/schema"}},
        {"json": {"$ref": "file:///etc/passwd"}},
        {"json": "[" * 60_000},
        {"json": '{"a": ' + "9" * 5000 + "}"},
    ],
)
async def test_an_error_names_no_file_of_the_server(client: httpx.AsyncClient, path: str, source: Any) -> None:
    response = await client.post(path, json={**BODIES[path], "max_tokens": 2, "structured_outputs": source})
    assert response.status_code in (200, 400), response.text
    assert not any(shown in response.text for shown in ("site-packages", "root:", ".py", "panicked")), response.text
