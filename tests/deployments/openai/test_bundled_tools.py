"""Tools out of the box: the bundled pair and the official client. What the model says is silly, the form is right."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pytest

from cluster.remote_drafter import RemoteDrafter
from cluster.remote_verifier import RemoteVerifier
from deployments.config import AppConfig
from deployments.observe.metrics import RouterMetrics
from deployments.router.round_loop import RoundLoop
from deployments.wire import Description, ModelLimits
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
    metrics = RouterMetrics(pair.engine, RemoteDrafter(timeout_s=1.0), RemoteVerifier(timeout_s=1.0))
    loop = RoundLoop(pair.engine, SimpleNamespace(), metrics, round_timeout_s=60.0)
    routers = BundledRouters(SimpleNamespace(engine=pair.engine, loop=loop, metrics=metrics))
    async with make_client(await make_app(AppConfig(stream_interval_s=0), routers)) as client:
        yield make_sdk(client)
    await loop.stop()


def check(call: Any) -> None:
    arguments = json.loads(call.arguments)
    jsonschema.validate(arguments, {"weather": SCHEMA, "clock": {"type": "object", "maxProperties": 0}}[call.name])


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
