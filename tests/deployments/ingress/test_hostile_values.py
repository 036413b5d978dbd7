"""Values that JSON, or Python's parser, lets pass, but no text and no computation can have: each is refused by name."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.conftest import client_of
from tests.deployments.fakes import LocalRouters
from tests.deployments.templates import HERMES

USER = '"messages": [{"role": "user", "content": "a"}], "max_tokens": 3'
JSON = {"content-type": "application/json"}
HUGE = "9" * 1000
VALUES = ["NaN", "-Infinity", "1e999"]
"""The parser makes a number of each."""


@pytest.fixture
async def client(routers: LocalRouters, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The client of a model whose template writes tools, calls and variables."""
    async with client_of(HERMES + "{{ kind }}", routers, tmp_path) as client:
        yield client


async def refusal(client: httpx.AsyncClient, path: str, body: str) -> dict[str, Any]:
    response = await client.post(path, content=body.encode(), headers=JSON)
    assert response.status_code == 400, (body, response.text)
    error: dict[str, Any] = response.json()["error"]
    return error


def tool(parameters: str, *, is_nested: bool = True) -> str:
    function = f'"name": "f", "parameters": {{"type": "object", "x": {parameters}}}'
    return f'[{{"type": "function", {f""""function": {{{function}}}""" if is_nested else function}}}]'


@pytest.mark.parametrize("value", VALUES)
async def test_numbers_that_json_does_not_have_are_refused_by_name(client: httpx.AsyncClient, value: str) -> None:
    chat = "/v1/chat/completions"
    form = f'"type": "json_schema", "name": "f", "schema": {{"x": {value}}}'
    for path, body, param in (
        (chat, f'{{{USER}, "tools": {tool(value)}}}', "tools.0.function.parameters"),
        (chat, f'{{{USER}, "tools": {tool(value)}, "tool_choice": "required"}}', "tools.0.function.parameters"),
        (chat, f'{{{USER}, "chat_template_kwargs": {{"kind": {value}}}}}', "chat_template_kwargs"),
        ("/tokenize", f'{{{USER.rpartition(",")[0]}, "tools": {tool(value)}}}', "tools.0.function.parameters"),
        ("/v1/completions", f'{{"prompt": "a", "structured_outputs": {{"json": {{"x": {value}}}}}}}', None),
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
        b'{"prompt": 1.5, "prompt": "a", "temperature": 1, "temperature": -1}',
        b'{"prompt": "a", "logit_bias": {"1": 1, "1": 1000}}',
        b'{"prompt": "a\x00b"}',
        b'{"prompt": "a", "metadata": {"\\udfff\\ud800": "a"}}',
    ],
)
async def test_what_is_no_json_or_says_a_thing_twice_is_judged_by_what_counts(
    client: httpx.AsyncClient, body: bytes
) -> None:
    """Of two values for a key the last one counts, as in most parsers; the first is not even looked at."""
    response = await client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


async def test_a_template_that_fails_is_the_requests_fault(routers: LocalRouters, tmp_path: Path) -> None:
    async with client_of(
        "{{ kind.upper() }}{{ kind[0] }}{{ raise_exception(kind) if kind else '' }}", routers, tmp_path
    ) as client:
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
