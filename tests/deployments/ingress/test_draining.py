"""What happens to requests that outlast the time that a stopped replica has for them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.errors import describe
from deployments.ingress import draining
from deployments.ingress.draining import LAST_WORDS_S, Draining, drain_s


async def test_requests_end_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "CHECK_PERIOD_S", 0.0)
    answers: list[float | None] = [None, None, 0.01]
    errors: list[Exception] = []
    await Draining(errors.append, lambda: answers.pop(0))._task
    assert answers == []
    [error] = errors
    kind, body = describe(error)
    assert (kind.status, body["error"]["code"]) == (503, "unavailable")
    assert body["error"]["message"] == "the server is shutting down, and the 0.01 s to finish requests are over"


async def test_a_replica_that_serves_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "CHECK_PERIOD_S", 0.0)
    errors: list[Exception] = []
    waiting = Draining(errors.append, lambda: None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting._task.done()
    assert errors == []


@pytest.mark.parametrize(
    ("is_stopped", "timeout_s", "expected"),
    [(False, 10.0, None), (True, 10.0, 10.0 - LAST_WORDS_S), (True, 1.0, 0.0)],
)
def test_serves_own_state_says_how_long_there_is(
    monkeypatch: pytest.MonkeyPatch, is_stopped: bool, timeout_s: float, expected: float | None
) -> None:
    config = SimpleNamespace(graceful_shutdown_timeout_s=timeout_s)
    replica: Any = SimpleNamespace(_deployment_config=config) if is_stopped else None
    monkeypatch.setattr(draining, "stopped_replica", lambda: replica)
    assert drain_s() == expected
