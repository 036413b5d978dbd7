"""Structured outputs through HTTP: the text matches, and what cannot be matched is refused before it is queued."""

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from tests.deployments.conftest import make_sdk
from tests.deployments.fakes import LocalRouters
from tests.deployments.requests import error_of, text_of

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 3, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUOTE, BRACE = ord('"') - ord("!"), ord("}") - ord("!")


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
async def test_json_fits_its_schema(schema: Any, temperature: float, client: httpx.AsyncClient) -> None:
    text = await text_of(client, structured_outputs={"json": schema}, temperature=temperature, seed=4)
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("regex", [r"[a-c]{3}-\d\d", r"(yes|no)!?", r"é+ü"])
async def test_a_regular_expression_matches_the_whole_text(regex: str, client: httpx.AsyncClient) -> None:
    assert re.fullmatch(regex, await text_of(client, structured_outputs={"regex": regex}, temperature=1, seed=1))


@pytest.mark.parametrize("choices", [["red", "redder", 'q"\\/\n\x7f\x00'], ["ü"]])
async def test_a_choice_is_one_of_them(choices: list[str], client: httpx.AsyncClient) -> None:
    for seed in range(5):
        text = await text_of(client, structured_outputs={"choice": choices}, temperature=100, seed=seed)
        assert text in choices


@pytest.mark.parametrize("grammar", ['root ::= "(" root ")" | [0-9]', 'start: "(" start ")" | /[0-9]/'])
async def test_a_grammar_is_followed_in_either_notation(grammar: str, client: httpx.AsyncClient) -> None:
    text = await text_of(client, structured_outputs={"grammar": grammar}, temperature=100, seed=3)
    assert re.fullmatch(r"\(*[0-9]\)*", text)
    assert text.count("(") == text.count(")")


async def test_the_openai_client_gets_the_requested_format(client: httpx.AsyncClient) -> None:
    sdk = make_sdk(client)
    messages: Any = [{"role": "user", "content": "who?"}]
    options: Any = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 300}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    chat = await sdk.chat.completions.create(**options, response_format=schema)
    jsonschema.validate(json.loads(chat.choices[0].message.content or ""), SCHEMA)

    biased = {**options, "logit_bias": {str(QUOTE): 50, str(BRACE): 60}}  # so that strings and the object end
    chat = await sdk.chat.completions.create(**biased, response_format={"type": "json_object"})
    assert isinstance(json.loads(chat.choices[0].message.content or ""), dict)

    chat = await sdk.chat.completions.create(**options, extra_body={"structured_outputs": {"choice": ["left"]}})
    assert chat.choices[0].message.content == "left"
    chat = await sdk.chat.completions.create(**{**options, "max_tokens": 3}, response_format={"type": "text"})
    assert len(chat.choices[0].message.content or "") == 3


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "has regex, choice"),
        ({"structured_outputs": {"grammar": "hello"}}, "structured_outputs.grammar", "neither Lark nor GBNF"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"json": "3"}}, "structured_outputs.json", "is an object"),
        ({"structured_outputs": {"json": {"type": "mouse"}}}, "structured_outputs.json", "mouse"),
        ({"structured_outputs": {"json": {"$ref": "http://localhost/"}}}, "structured_outputs.json", "not present"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex", "70,000 characters, at most"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens", "cannot be combined with a grammar"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "cannot be combined with a grammar"),
        ({"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"messages": MESSAGES, "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "with a response_format",
        ),
        (
            {
                "messages": MESSAGES,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
                },
            },
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
    ],
)
async def test_a_format_that_cannot_be_followed_is_refused_by_name(
    body: dict[str, Any], param: str, message: str, client: httpx.AsyncClient, routers: LocalRouters
) -> None:
    error = await error_of(client, **body)
    assert message in error["message"]
    assert error["param"] == param
    assert routers.last is None
