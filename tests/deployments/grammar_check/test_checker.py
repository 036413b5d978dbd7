"""GrammarChecker: a grammar that takes too long is stopped, and nothing else waits for it, no other grammar either."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig, Limits
from deployments.grammar_check.checker import GrammarChecker
from engine.config import ModelInfo
from engine.errors import CapacityError
from engine.sampling.grammar import Grammars, from_regex
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import MAX_MODEL_LEN, VOCAB_SIZE, LocalRouters
from tests.deployments.requests import error_of, text_of

# Six seconds on two cores; nothing in it looks expensive.
SLOW = {"type": "integer", "multipleOf": 10_000_019}


@pytest.fixture
async def hasty(config: AppConfig, routers: LocalRouters) -> AsyncIterator[httpx.AsyncClient]:
    config = config.model_copy(update={"limits": Limits(grammar_timeout_s=1.0)})
    async with make_client(await make_app(config, routers)) as client:
        yield client


async def test_a_grammar_that_takes_too_long_is_stopped(hasty: httpx.AsyncClient) -> None:
    """And nothing else waits for it: neither texts meanwhile, nor formats afterwards."""
    await text_of(hasty, structured_outputs={"regex": "a"})
    started = time.monotonic()
    slow = asyncio.create_task(error_of(hasty, structured_outputs={"json": SLOW}))
    await asyncio.sleep(0.1)
    response = await hasty.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    assert response.status_code == 200
    assert not slow.done()
    error = await slow
    assert error["message"] == "structured_outputs.json cannot be compiled within 1 s"
    assert error["param"] == "structured_outputs.json"
    assert time.monotonic() - started < 30
    assert await text_of(hasty, structured_outputs={"regex": "b"}) == "b"


async def test_grammars_that_take_long_hold_no_other_up(hasty: httpx.AsyncClient) -> None:
    slow = [
        asyncio.create_task(error_of(hasty, structured_outputs={"json": {"type": "integer", "multipleOf": multiple}}))
        for multiple in (10_000_019, 10_000_021, 10_000_023)
    ]
    await text_of(hasty, structured_outputs={"regex": "a"})  # also starts the process
    assert await text_of(hasty, structured_outputs={"regex": "b"}) == "b"
    assert not any(task.done() for task in slow)
    assert len(await asyncio.gather(*slow)) == 3


async def test_a_process_that_has_ended_is_started_again(grammars: Grammars) -> None:
    checker = GrammarChecker(grammars, timeout_s=60)
    checker.check(from_regex("a"), "regex")
    first = checker._process
    assert first is not None
    first._popen.kill()
    first._popen.wait()
    checker.check(from_regex("a"), "regex")  # it is known
    assert checker._process is first
    checker.check(from_regex("b"), "regex")
    assert checker._process is not first


async def test_a_process_that_ends_meanwhile_is_no_fault_of_the_grammar(grammars: Grammars) -> None:
    checker = GrammarChecker(grammars, timeout_s=60)
    checker.check(from_regex("a"), "regex")
    assert checker._process is not None
    checker._process._popen.send_signal(signal.SIGSTOP)
    waiting = asyncio.create_task(asyncio.to_thread(checker.check, from_regex("b"), "regex"))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    checker._process._popen.kill()
    with pytest.raises(CapacityError, match="the process that compiles grammars has ended"):
        await waiting


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
        (
            {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
            "no JSON is valid under the schema: it refers to itself without an end",
        ),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
        ({"json": {"enum": []}}, "Unsatisfiable schema: anyOf is empty"),
        ({"regex": r"[^\s\S]"}, "no text matches the regular expression"),
        ({"regex": r"x[^\s\S]"}, "no text matches the regular expression"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "root ::= root"}, "no text matches the grammar: a rule leads only to itself"),
        ({"grammar": 'start: start "a"'}, "no text matches the grammar: a rule leads only to itself"),
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


async def test_a_refused_format_of_a_chat_names_its_cause(client: httpx.AsyncClient) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "loop", "schema": {"$ref": "#"}}}
    error = await error_of(client, messages=[{"role": "user", "content": "a"}], response_format=schema)
    assert error["message"] == (
        "response_format.json_schema.schema: no JSON is valid under the schema: it refers to itself without an end"
    )
