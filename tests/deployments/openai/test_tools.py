"""Tools: a required call always fits its schema, and arrives in a stream piece by piece."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from tests.deployments.conftest import client_of, make_sdk
from tests.deployments.fakes import LocalRouters
from tests.deployments.templates import HERMES, LLAMA, family

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


@pytest.fixture(params=[HERMES, LLAMA], ids=["hermes", "llama"])
async def sdk(
    request: pytest.FixtureRequest, routers: LocalRouters, tmp_path: Path
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(request.param, routers, tmp_path) as client:
        yield make_sdk(client)


def check(name: str, arguments: str) -> None:
    assert name in ("weather", "clock")
    jsonschema.validate(json.loads(arguments), SCHEMA if name == "weather" else {"type": "object"})


NAMED = {"type": "function", "function": {"name": "weather"}}
FORCED: Any = {
    "model": "tiny",
    "messages": USER,
    "tools": TOOLS[:1],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 1,
    "seed": 2,
    "extra_body": {"repetition_penalty": 2.0},
}


@pytest.mark.parametrize(("choice", "n"), [("required", 2), (NAMED, 1)], ids=["required", "named"])
async def test_a_stream_of_deltas_is_the_whole_answer(
    sdk: openai.AsyncOpenAI, tokenizer: PreTrainedTokenizerFast, choice: Any, n: int
) -> None:
    # Without white space a call always has the same number of characters, whatever the model draws.
    no_blanks = {str(token_id): -100 for token_id in tokenizer.encode(" \n\t")}
    options: Any = {**FORCED, "tool_choice": choice, "n": n, "logprobs": True, "max_tokens": 120}
    options |= {"logit_bias": no_blanks, "extra_body": {"return_token_ids": True}}
    wholes = (await sdk.chat.completions.create(**options)).choices
    chunks = [chunk async for chunk in await sdk.chat.completions.create(**options, stream=True)]
    for whole in wholes:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == whole.index]
        assert "".join(piece.delta.content or "" for piece in mine) == ""
        deltas = [delta for piece in mine for delta in piece.delta.tool_calls or []]
        for index, call in enumerate(whole.message.tool_calls or []):
            assert call.type == "function"
            first, *rest = [delta for delta in deltas if delta.index == index]
            assert first.id
            assert first.type == "function"
            assert (first.function.name, first.function.arguments) == (call.function.name, "")
            assert all(delta.id is None and delta.type is None for delta in rest)
            assert len(rest) == len(call.function.arguments)  # in fragments, as they are generated
            fragments = [delta.function.arguments or "" for delta in rest if delta.function]
            assert "".join(fragments) == call.function.arguments
            check(call.function.name, call.function.arguments)
        assert {delta.index for delta in deltas} == set(range(len(whole.message.tool_calls or [])))
        ends = [piece.finish_reason for piece in mine if piece.finish_reason]
        assert ends == [whole.finish_reason]
        assert mine[-1].finish_reason == ("tool_calls" if choice == "required" else "stop")
        token_ids = [token for piece in mine for token in (piece.model_extra or {}).get("token_ids") or []]
        assert token_ids == (whole.model_extra or {})["token_ids"]
        logprobs = [entry for piece in mine if piece.logprobs for entry in piece.logprobs.content or []]
        assert logprobs == whole.logprobs.content


async def test_a_call_without_a_grammar_cannot_be_required(routers: LocalRouters, tmp_path: Path) -> None:
    body = {"messages": USER, "tools": TOOLS, "max_tokens": 4}
    async with client_of(family("<|start|>assistant\n", "", "qwen3-coder"), routers, tmp_path) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        response = await client.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_the_markup_of_a_call_that_the_limit_cuts_is_no_content(sdk: openai.AsyncOpenAI, choice: Any) -> None:
    options = {**FORCED, "tool_choice": choice, "max_tokens": 16}
    cut = (await sdk.chat.completions.create(**options)).choices[0]
    assert (cut.message.content or "", cut.message.tool_calls, cut.finish_reason) == ("", None, "length")
    chunks = [chunk.choices[0] async for chunk in await sdk.chat.completions.create(**options, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    response = await sdk.responses.create(
        model="tiny", input="x", tools=tools, tool_choice="required", max_output_tokens=16
    )
    assert (response.output_text, response.status) == ("", "incomplete")


async def test_a_cut_call_can_be_sent_back(sdk: openai.AsyncOpenAI) -> None:
    """As an agent's loop does, through LiteLLM or not."""
    cut, whole = [(await sdk.chat.completions.create(**FORCED, max_tokens=limit)).choices[0] for limit in (60, None)]
    message = cut.message.model_dump()
    (shown,), (call,) = ([made.function.arguments for made in one.message.tool_calls or []] for one in (cut, whole))  # type: ignore[union-attr]
    assert cut.finish_reason == "length"
    assert 0 < len(shown) < len(call)
    assert call.startswith(shown)
    more = {"provider_specific_fields": {"refusal": None}, "cache_control": {"type": "ephemeral"}}
    message |= {**more, "thinking_blocks": [{"type": "thinking", "thinking": "a", "signature": "b"}]}
    (call,) = message["tool_calls"]
    call |= {"index": 0, "provider_specific_fields": None}
    call["function"]["provider_specific_fields"] = {"thought_signature": "c"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    chat = await sdk.chat.completions.create(**{**FORCED, "messages": [*USER, message, result], "max_tokens": 4})
    assert chat.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError) as error:
        await sdk.chat.completions.create(**{**FORCED, "messages": [*USER, {**message, "other_fields": {}}]})
    assert error.value.param == "messages.1.other_fields"
