"""What an Ingress knows of the Routers without asking them."""

import asyncio

import pytest

from deployments.ingress import readiness
from deployments.ingress.readiness import Readiness
from deployments.router.state import RouterState

READY = RouterState("a", None)
RECOVERING = RouterState("b", "the target is being restarted")


async def never() -> list[RouterState | Exception]:
    await asyncio.Event().wait()
    return []


async def test_one_ready_router_is_enough() -> None:
    known = Readiness(never)
    assert known.problem == "no Router is running"
    known.note([RECOVERING])
    assert known.problem == "the target is being restarted"
    known.note([RECOVERING, READY])
    assert known.problem is None
    assert [heard.state for heard in known.routers] == [RECOVERING, READY]


async def test_a_router_that_is_gone_is_forgotten_at_once() -> None:
    known = Readiness(never)
    known.note([READY, RECOVERING])
    known.note([RECOVERING])
    assert known.problem == "the target is being restarted"
    known.note([])
    assert known.problem == "no Router is running"


async def test_a_late_router_counts_as_what_it_said_until_that_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Readiness(never)
    known.note([READY])
    known.note([TimeoutError()])
    assert known.problem is None
    known.note([RECOVERING, TimeoutError()])
    assert known.problem is None
    monkeypatch.setattr(readiness, "MAX_AGE_S", 0.0)
    assert known.problem == "no Router is running"


async def test_routers_are_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PERIOD_S", 0.0)
    answers = iter([[READY], [RECOVERING]])

    async def ask() -> list[RouterState | Exception]:
        answer: list[RouterState | Exception] | None = next(answers, None)  # type: ignore[arg-type]
        return await never() if answer is None else answer

    known = Readiness(ask)
    async with asyncio.timeout(5):
        while known.problem != RECOVERING.problem:
            await asyncio.sleep(0)
