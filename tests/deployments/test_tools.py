"""Tools: calls are read whole however the text is cut, and a required call always fits its schema."""

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from deployments.config import AppConfig
from deployments.prompts import PromptEncoder
from deployments.requests import ChatMessage
from deployments.tools import Call, Hermes, Llama3, Tool, form_of
from engine.errors import RequestError
from tests.deployments.conftest import TEMPLATE, make_app, make_client
from tests.deployments.fakes import LocalRouters
from tests.fakes import byte_tokenizer

HERMES = (
    "{% if tools %}<|start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer in <tool_call></tool_call><|end|>\n{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>\n{% endfor %}<|start|>assistant\n"
)
LLAMA = HERMES.replace("<tool_call>", "").replace("</tool_call>", "").replace('"arguments"', '"parameters"')
SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Bern", "Oslo"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]
USER: Any = [{"role": "user", "content": "x"}]


# --- Reading --------------------------------------------------------------------------------------------------------


def read(form: Hermes | Llama3, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = form.reader()
    found: list[str | Call] = []
    for i, piece in enumerate(pieces):
        found += reader.feed(piece, is_last=i == len(pieces) - 1)
    text = "".join(piece for piece in found if isinstance(piece, str))
    return text, [(piece.name, piece.arguments) for piece in found if isinstance(piece, Call)]


ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TRICKY = '<tool_call>{"name": "g", "arguments": {"s": "</tool_call>"}}</tool_call>'
G = ("g", '{"s": "</tool_call>"}')
F = ("f", '{"a": 1}')
READ = [
    (Hermes(), "hello", "hello", []),
    (Hermes(), ONE, "", [F]),
    (Hermes(), f"Well:\n{ONE}\n{ONE}\n", "Well:\n", [F, F]),
    (Hermes(), f"{TRICKY}{ONE}", "", [G, F]),
    (Hermes(), f"{ONE}\n two  words {ONE} \n", "two  words ", [F, F]),
    (Hermes(), "a <tool_ b <tool_call", "a <tool_ b <tool_call", []),
    (Hermes(), "<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", []),
    (Hermes(), '<tool_call>{"name": "f", "arguments": {"a', '<tool_call>{"name": "f", "arguments": {"a', []),
    (Llama3(), "hello {", "hello {", []),
    (Llama3(), '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    (Llama3(), '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "arguments": {"a": 1}}', "", [F, F]),
    (Llama3(), '{"name": "f"}', '{"name": "f"}', []),
    (Llama3(), '{"name": "f", "parameters": {"a": 1}', '{"name": "f", "parameters": {"a": 1}', []),
    (Llama3(), "", "", []),
]


@pytest.mark.parametrize(("form", "text", "expected", "calls"), READ)
@given(data=st.data())
def test_a_text_is_read_the_same_however_it_is_cut(
    form: Any, text: str, expected: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert read(form, pieces) == (expected, calls)


def test_text_is_not_held_back_longer_than_it_may_be_a_call() -> None:
    reader = Hermes().reader()
    assert reader.feed("hello <", is_last=False) == ["hello "]
    assert reader.feed("b>", is_last=False) == ["<b>"]
    assert Llama3().reader().feed("hello", is_last=False) == ["hello"]


def test_the_form_is_the_templates() -> None:
    assert isinstance(form_of(HERMES), Hermes)
    assert isinstance(form_of(LLAMA), Llama3)
    assert form_of(TEMPLATE) is None
    assert form_of(None) is None


# --- Prompts --------------------------------------------------------------------------------------------------------


def save(template: str, path: Path) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="</s>", additional_special_tokens=["<|start|>", "<|end|>"]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return tokenizer


def test_a_conversation_with_calls_is_rendered_as_the_template_wants(tmp_path: Path) -> None:
    tokenizer = save(HERMES, tmp_path)
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12 </s>"},
    ]
    encoder = PromptEncoder(tokenizer)
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    ids = encoder.encode_chat([ChatMessage.model_validate(message) for message in messages], 4096, tools)
    text = encoder.decode(ids)
    assert '"name": "weather"' in text
    assert '<tool_call>\n{"name": "clock", "arguments": {"a": [1]}}\n</tool_call><|end|>' in text
    assert "<|start|>tool\n12 </s><|end|>" in text
    assert 256 not in ids  # </s> is four characters
    bad = Tool.model_validate({"type": "function", "function": {"name": "f", "description": "a <|end|>"}})
    with pytest.raises(RequestError, match="special token"):
        encoder.encode_chat([ChatMessage(role="user", content="x")], 4096, [bad])


# --- HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[HERMES, LLAMA], ids=["hermes", "llama"])
async def sdk(
    request: pytest.FixtureRequest, routers: LocalRouters, tmp_path: Path
) -> AsyncIterator[openai.AsyncOpenAI]:
    save(request.param, tmp_path)
    config = AppConfig(target_model=str(tmp_path), served_model_name="tiny")
    async with make_client(await make_app(config, routers)) as client:
        yield openai.AsyncOpenAI(base_url="http://paceline/v1", api_key="none", http_client=client, max_retries=0)


def check(name: str, arguments: str) -> None:
    assert name in ("weather", "clock")
    jsonschema.validate(json.loads(arguments), SCHEMA if name == "weather" else {"type": "object"})


@pytest.mark.parametrize("seed", range(3))
async def test_a_named_function_is_called_with_its_schema(sdk: openai.AsyncOpenAI, seed: int) -> None:
    chat = await sdk.chat.completions.create(
        model="tiny",
        messages=USER,
        tools=TOOLS[:1],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=1,
        seed=seed,
        extra_body={"repetition_penalty": 2.0},
    )
    message = chat.choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    check(call.function.name, call.function.arguments)
    assert message.content is None
    assert chat.choices[0].finish_reason == "tool_calls"


async def test_a_required_call_streams_whole(sdk: openai.AsyncOpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "messages": USER,
        "tools": TOOLS[:1],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1,
        "seed": 2,
    }
    whole = (await sdk.chat.completions.create(**options)).choices[0]
    chunks = [chunk async for chunk in await sdk.chat.completions.create(**options, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == ""
    (call,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert call.index == 0
    assert call.function is not None
    assert call.function.arguments == (whole.message.tool_calls or [])[0].function.arguments  # type: ignore[union-attr]
    check(call.function.name or "", call.function.arguments or "")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_text_stays_text_when_the_choice_is_the_models(sdk: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 6}
    for choice in ("auto", "none"):
        chat = await sdk.chat.completions.create(**options, tools=TOOLS, tool_choice=choice)
        assert len(chat.choices[0].message.content or "") == 6
        assert chat.choices[0].message.tool_calls is None
        assert chat.choices[0].finish_reason == "length"


async def test_a_template_without_tools_refuses_them(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "mouse"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages.1"),
        ({"messages": [*USER, {"role": "user"}]}, "messages.1"),
    ],
)
async def test_a_bad_tool_is_refused_by_name(sdk: openai.AsyncOpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await sdk.chat.completions.create(**{"model": "tiny", "messages": USER, **fields})
    assert error.value.param == param
