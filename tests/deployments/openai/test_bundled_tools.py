"""Tools out of the box: the bundled pair and the official client. What the model says is silly, the form is right."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pytest

from deployments.config import AppConfig
from deployments.metrics import RouterMetrics
from deployments.router.generation import Description, ModelLimits
from deployments.router.round_loop import RoundLoop
from engine.config import ModelInfo
from engine.llm import LLM
from tests.deployments.conftest import make_app, make_client, make_sdk
from tests.deployments.fakes import LocalRouters

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
USER: Any = {"role": "user", "content": "What is the weather in Bern?"}
OPTIONS: Any = {"model": "paceline", "messages": [USER], "tools": TOOLS, "temperature": 0.7, "max_tokens": 160}


class BundledRouters(LocalRouters):
    """The bundled pair in this process, as an Ingress sees it."""

    async def describe(self) -> Description:
        engine = self.rig.engine
        info = ModelInfo("bundled", engine.vocab_size, 2048, [0], 1, "float32", "cpu")
        return Description(info, None, ModelLimits(engine.vocab_size, 2048, 4), capacity=72)


@pytest.fixture(scope="module")
def pair() -> LLM:
    return LLM(compile="off", dtype="float32", max_num_seqs=4, num_blocks=600)


@pytest.fixture
async def sdk(pair: LLM) -> AsyncIterator[openai.AsyncOpenAI]:
    metrics = RouterMetrics("paceline", pair.engine, pair.engine.drafter)
    loop = RoundLoop(pair.engine, SimpleNamespace(), metrics, max_recoveries=0, round_timeout_s=60.0)
    routers = BundledRouters(SimpleNamespace(engine=pair.engine, loop=loop, metrics=metrics))
    async with make_client(await make_app(AppConfig(stream_interval_s=0), routers)) as client:
        yield make_sdk(client)
    await loop.stop()


def check(call: Any) -> None:
    arguments = json.loads(call.arguments)
    jsonschema.validate(arguments, {"weather": SCHEMA, "clock": {"type": "object", "maxProperties": 0}}[call.name])


async def test_the_model_may_choose_not_to_call(sdk: openai.AsyncOpenAI) -> None:
    for choice in ("auto", "none"):
        chat = await sdk.chat.completions.create(**{**OPTIONS, "max_tokens": 12, "seed": 1}, tool_choice=choice)
        assert chat.choices[0].message.content
        assert chat.choices[0].message.tool_calls is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
async def test_a_call_that_is_required_fits_its_schema(sdk: openai.AsyncOpenAI, choice: Any) -> None:
    for seed in range(3):
        options = {**OPTIONS, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        whole = (await sdk.chat.completions.create(**options)).choices[0]
        (call,) = whole.message.tool_calls or []
        assert call.type == "function"
        check(call.function)
        assert choice == "required" or call.function.name == "weather"
        assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
        async with sdk.chat.completions.stream(**options) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        assert [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls or []] == [
            (call.function.name, call.function.arguments)
        ]


async def test_several_calls_stream_side_by_side(sdk: openai.AsyncOpenAI) -> None:
    written = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    text = f"Let me see.\n{written}\n{written}"
    options = {**OPTIONS, "extra_body": {"structured_outputs": {"choice": [text]}}}
    stream = await sdk.chat.completions.create(**options, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or []]
    assert [delta.index for delta in deltas if delta.id] == [0, 1]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see.\n"
    assert chunks[-1].finish_reason == "tool_calls"


async def test_a_result_is_part_of_the_conversation(sdk: openai.AsyncOpenAI) -> None:
    options = {**OPTIONS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 0}
    message = (await sdk.chat.completions.create(**options)).choices[0].message
    (call,) = message.tool_calls or []
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [USER, message.model_dump(exclude_none=True), result]
    chat = await sdk.chat.completions.create(**{**OPTIONS, "messages": messages, "max_tokens": 12})
    assert chat.choices[0].message.content


async def test_responses_call_and_take_results_too(sdk: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "paceline", "tools": FLAT, "temperature": 0.7, "max_output_tokens": 160}
    options["extra_body"] = {"seed": 0}
    asked: Any = {"input": [USER], "tool_choice": {"type": "function", "name": "weather"}}
    response = await sdk.responses.create(**options, **asked)
    (call,) = response.output
    assert call.type == "function_call"
    check(call)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history: Any = [USER, call.model_dump(exclude_none=True), result]
    answer = await sdk.responses.create(**{**options, "max_output_tokens": 12}, input=history)
    assert answer.output_text
