"""Values that JSON, or Python's parser, lets pass, but no text and no computation can have: each is refused by name.

| mutant | caught by |
|---|---|
| `check_json` lets numbers pass that are not finite | test_what_no_text_can_hold_is_refused_by_name |
| `check_json` lets half a surrogate pair pass | test_what_no_text_can_hold_is_refused_by_name |
| the arguments of earlier calls are not checked | test_what_no_text_can_hold_is_refused_by_name |
| errors that a template raises are not caught | test_a_template_that_fails_is_the_requests_fault |
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters
from tests.deployments.templates import HERMES, save_tokenizer

USER = '"messages": [{"role": "user", "content": "a"}], "max_tokens": 3'
JSON = {"content-type": "application/json"}
HUGE = "9" * 1000
VALUES = ["NaN", "-Infinity", "1e999", r'"\ud800"', r'{"\udfff": 1}', r'["a", {"b": "\udfff\ud800"}]']
"""Python's parser makes something of each."""


@pytest.fixture
async def client(routers: LocalRouters, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The client of a model whose template writes tools, calls and variables."""
    save_tokenizer(HERMES + "{{ kind }}", tmp_path)
    config = AppConfig(target_model=str(tmp_path), served_model_name="tiny", stream_interval_s=0)
    async with make_client(await make_app(config, routers)) as client:
        yield client


async def refusal(client: httpx.AsyncClient, path: str, body: str) -> dict[str, Any]:
    response = await client.post(path, content=body.encode(), headers=JSON)
    assert response.status_code == 400, (body, response.text)
    error: dict[str, Any] = response.json()["error"]
    return error


def tool(parameters: str, *, is_nested: bool = True) -> str:
    function = f'"name": "f", "parameters": {{"type": "object", "x": {parameters}}}'
    return f'[{{"type": "function", {f""""function": {{{function}}}""" if is_nested else function}}}]'


def call(arguments: str) -> str:
    function = {"name": "f", "arguments": arguments}
    return json.dumps({"role": "assistant", "tool_calls": [{"type": "function", "id": "c", "function": function}]})


@pytest.mark.parametrize("value", VALUES)
async def test_what_no_text_can_hold_is_refused_by_name(client: httpx.AsyncClient, value: str) -> None:
    chat = "/v1/chat/completions"
    form = f'"type": "json_schema", "name": "f", "schema": {{"x": {value}}}'
    for path, body, param in (
        (chat, f'{{{USER}, "tools": {tool(value)}}}', "tools.0.function.parameters"),
        (chat, f'{{{USER}, "tools": {tool(value)}, "tool_choice": "required"}}', "tools.0.function.parameters"),
        (chat, f'{{{USER}, "chat_template_kwargs": {{"kind": {value}}}}}', "chat_template_kwargs"),
        ("/tokenize", f'{{{USER.rpartition(",")[0]}, "tools": {tool(value)}}}', "tools.0.function.parameters"),
        ("/v1/completions", f'{{"prompt": "a", "structured_outputs": {{"json": {{"x": {value}}}}}}}', None),
        (chat, f'{{"messages": [{call(f"""{{"x": {value}}}""")}]}}', "messages"),
        ("/v1/responses", f'{{"input": "a", "tools": {tool(value, is_nested=False)}}}', "tools.0.parameters"),
        (
            "/v1/responses",
            f'{{"input": "a", "tools": {tool(value, is_nested=False)}, "tool_choice": "none"}}',
            "tools.0.parameters",
        ),
        ("/v1/responses", f'{{"input": "a", "text": {{"format": {{{form}}}}}}}', "text.format.schema"),
    ):
        error = await refusal(client, path, body)
        assert error["param"] == param or (param is None and error["param"].startswith("structured_outputs.json")), body


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", HUGE, f"-{HUGE}", f"{HUGE}e{HUGE[:3]}"])
async def test_numbers_of_any_size_are_refused_by_name(client: httpx.AsyncClient, number: str) -> None:
    fields = ("temperature", "top_p", "top_k", "min_p", "n", "best_of", "seed", "max_tokens", "logprobs")
    for field in (*fields, "prompt_logprobs", "stop_token_ids.0", "logit_bias.1"):
        name, _, key = field.partition(".")
        value = {"": number, "0": f"[{number}]", "1": f'{{"1": {number}}}'}[key]
        error = await refusal(client, "/v1/completions", f'{{"prompt": "a", "{name}": {value}}}')
        assert error["param"] == field
        assert len(error["message"]) < 1500


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "prompt": 1.5}',
        b'{"prompt": 1.5, "prompt": "a", "temperature": 1, "temperature": -1}',
        b'{"prompt": "a", "logit_bias": {"1": 1, "1": 1000}}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xc0\x80"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a\x00b"}',
        b'{"prompt": "a",}',
        b"{'prompt': 'a'}",
        b'{"prompt": "a"} {}',
        b'{"prompt": 0x10}',
        b'{"prompt": "a", "seed": 01}',
        b'{"prompt": "a"} // comment',
    ],
)
async def test_what_is_no_json_or_says_a_thing_twice_is_judged_by_what_counts(
    client: httpx.AsyncClient, body: bytes
) -> None:
    """Of two values for a key the last one counts, as in most parsers; the first is not even looked at."""
    response = await client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "variables",
    [
        {"messages": []},
        {"tools": [{}]},
        {"chat_template": "{{ 7 * 7 }}"},
        {"tokenize": True},
        {"add_generation_prompt": False},
        {"self": 1},
        {"conversation": []},
        {"tojson": 1, "raise_exception": "x"},
        {"kind": "</s>"},
    ],
)
async def test_a_variable_takes_no_argument_of_the_templates_place(
    client: httpx.AsyncClient, variables: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "chat_template_kwargs": variables}
    response = await client.post("/v1/chat/completions", json=body)
    is_harmless = "tojson" in variables  # no variable is called here
    assert response.status_code == (200 if is_harmless else 400), response.text


async def test_a_template_that_fails_is_the_requests_fault(routers: LocalRouters, tmp_path: Path) -> None:
    save_tokenizer("{{ kind.upper() }}{{ kind[0] }}{{ raise_exception(kind) if kind else '' }}", tmp_path)
    config = AppConfig(target_model=str(tmp_path), served_model_name="tiny", stream_interval_s=0)
    async with make_client(await make_app(config, routers)) as client:
        for kind in (1, "", None, {"upper": 1}, "x" * 5000):
            body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"kind": kind}}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 400, response.text
            assert len(response.content) < 1000
            assert "/" not in response.json()["error"]["message"]  # no path of a file


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_error_names_no_file_of_the_server(client: httpx.AsyncClient, path: str) -> None:
    grammars: list[dict[str, Any]] = [
        {"regex": "("},
        {"regex": "(?P<"},
        {"grammar": "start: %import common.WORD"},
        {"grammar": 'start: %json {"$ref": "file:///etc/passwd"}'},
        {"grammar": "start: @other"},
        {"json": {"$ref": "http://example.com/schema"}},
        {"json": {"$ref": "file:///etc/passwd"}},
        {"json": "[" * 60_000},
        {"json": '{"a": ' + "9" * 5000 + "}"},
    ]
    base = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    for source in grammars:
        response = await client.post(path, json={**base, "max_tokens": 2, "structured_outputs": source})
        assert response.status_code in (200, 400), response.text
        assert not any(part in response.text for part in ("site-packages", "root:", ".py", "panicked")), response.text
