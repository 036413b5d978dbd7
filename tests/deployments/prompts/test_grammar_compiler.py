"""GrammarCompiler: a grammar that takes too long is stopped, and nothing else waits for it, no other grammar either."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig
from deployments.openai.structured_output import GrammarSource, StructuredOutputs, structured_source
from deployments.prompts import grammar_compiler as module
from deployments.prompts.grammar_compiler import GrammarCompiler
from engine.config import ModelInfo
from engine.errors import CapacityError, RequestError
from engine.sampling import grammar
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_text import MAX_GBNF_RULES
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import MAX_MODEL_LEN, VOCAB_SIZE, LocalRouters
from tests.deployments.requests import complete, error_of, text_of

# Six seconds on two cores; nothing in it looks expensive.
SLOW = {"type": "integer", "multipleOf": 10_000_019}


@pytest.fixture
async def hasty(
    config: AppConfig, routers: LocalRouters, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(module, "TIMEOUT_S", 1.0)
    async with make_client(await make_app(config, routers)) as client:
        yield client


async def test_a_grammar_that_takes_too_long_is_stopped(hasty: httpx.AsyncClient) -> None:
    """And nothing else waits for it: neither texts and other grammars meanwhile, nor formats afterwards."""
    await text_of(hasty, structured_outputs={"regex": "a"})
    started = time.monotonic()
    slow = asyncio.create_task(error_of(hasty, structured_outputs={"json": SLOW}))
    await asyncio.sleep(0.1)
    response = await hasty.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    assert response.status_code == 200
    assert await text_of(hasty, structured_outputs={"regex": "c"}) == "c"
    assert not slow.done()
    error = await slow
    assert error["message"] == "structured_outputs.json cannot be compiled within 1 s"
    assert error["param"] == "structured_outputs.json"
    assert time.monotonic() - started < 30
    assert await text_of(hasty, structured_outputs={"regex": "b"}) == "b"


def regex(text: str) -> GrammarSource:
    return structured_source(StructuredOutputs(regex=text))


async def test_a_process_that_has_ended_is_started_again(grammars: Grammars) -> None:
    compiler = GrammarCompiler(grammars)
    await compiler.compile(regex("a"))
    first = compiler._process
    first._popen.kill()
    first._popen.wait()
    await compiler.compile(regex("a"))  # it is known
    assert compiler._process is first
    await compiler.compile(regex("b"))
    assert compiler._process is not first


async def test_a_process_that_ends_meanwhile_is_no_fault_of_the_grammar(grammars: Grammars) -> None:
    compiler = GrammarCompiler(grammars)
    await compiler.compile(regex("a"))
    compiler._process._popen.send_signal(signal.SIGSTOP)
    waiting = asyncio.create_task(compiler.compile(regex("b")))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    compiler._process._popen.kill()
    with pytest.raises(CapacityError, match="the process that compiles grammars has ended"):
        await waiting


async def test_a_source_that_is_too_long_is_not_even_converted(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_GRAMMAR_CHARS", 20)
    compiler = GrammarCompiler(grammars)
    assert await compiler.compile(regex("a|b")) == regex("a|b").to_grammar()
    source = GrammarSource("the.field", "x" * 21, lambda: pytest.fail("it was converted"))
    with pytest.raises(RequestError, match="has 21 characters, at most 20 are allowed") as error:
        await compiler.compile(source)
    assert error.value.param == "the.field"


async def test_a_grammar_of_very_many_rules_is_not_even_converted(grammars: Grammars) -> None:
    rules = "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(MAX_GBNF_RULES))
    source = structured_source(StructuredOutputs(grammar=f"root ::= r0\n{rules}"))
    with pytest.raises(RequestError, match="has 1,001 rules in GBNF, at most 1,000 are allowed") as error:
        await GrammarCompiler(grammars).compile(source)
    assert error.value.param == "structured_outputs.grammar"


async def test_a_model_whose_texts_do_not_end_cannot_follow_a_grammar(
    config: AppConfig, routers: LocalRouters, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = await routers.describe()
    endless = ModelInfo("tiny", VOCAB_SIZE, MAX_MODEL_LEN, [], 1000, "float32", "cpu")

    async def describe() -> Any:
        return replace(described, target=endless)

    monkeypatch.setattr(routers, "describe", describe)
    async with make_client(await make_app(config, routers)) as client:
        error = await error_of(client, structured_outputs={"regex": "a"})
    assert "cannot follow a grammar: it has no end-of-sequence token" in error["message"]
    assert error["param"] == "structured_outputs.regex"


@pytest.mark.parametrize(
    ("outputs", "cause"),
    [
        ({"json": {"$ref": "#"}}, "no JSON is valid under the schema: it refers to itself without an end"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
        ({"regex": r"[^\s\S]"}, "no text matches the regular expression"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "root ::= root"}, "no text matches the grammar: a rule leads only to itself"),
        ({"grammar": "start: /[^\\s\\S]/"}, "or an expression matches nothing"),
    ],
)
async def test_a_refusal_names_its_cause(client: httpx.AsyncClient, outputs: dict[str, Any], cause: str) -> None:
    error = await error_of(client, structured_outputs=outputs)
    field = f"structured_outputs.{next(iter(outputs))}"
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
    assert cause in error["message"]
    assert "NoExtensionBias" not in error["message"]
    assert "non-verbose" not in error["message"]


async def test_a_grammar_whose_masks_take_too_long_ends_its_own_request_alone(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MASKS_S", -1.0)
    constrained = {"structured_outputs": {"regex": "[a-z]{200}"}, "max_tokens": 100, "n": 2}
    error, whole = await asyncio.gather(error_of(client, **constrained), complete(client, max_tokens=100))
    assert error["param"] == "structured_outputs"
    assert error["message"] == (
        "the grammar is too complex to be followed any further (its masks take too long); simplify it"
    )
    assert whole["choices"][0]["finish_reason"] == "length"
