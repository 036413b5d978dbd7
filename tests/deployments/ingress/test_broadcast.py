"""Calls to all replicas: a late one costs the others nothing."""

import asyncio
from typing import Any

from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from deployments.ingress.broadcast import ask_all
from engine.errors import TargetError


class Call:
    """A call to one replica, as Serve's router makes it."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if isinstance(self._answer, BaseException):
            raise self._answer
        if self._answer is None:
            await asyncio.Event().wait()
        return self._answer


class Handle:
    """Serve's handle, with its real response, to replicas that give these answers; None never comes."""

    def __init__(self, *answers: Any, error: Exception | None = None, is_stuck: bool = False) -> None:
        self._answers = answers
        self._error = error
        self._is_stuck = is_stuck

    def broadcast(self, method: str) -> DeploymentBroadcastResponse:
        assert method == "state"
        return DeploymentBroadcastResponse(self._calls(), asyncio.get_running_loop())

    async def _calls(self) -> list[Call]:
        if self._is_stuck:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        return [Call(answer) for answer in self._answers]


async def test_a_replica_that_does_not_answer_hides_no_other() -> None:
    first, late, last = await ask_all(Handle("a", None, "b"), "state", timeout_s=0.05)
    assert (first, last) == ("a", "b")
    assert isinstance(late, TimeoutError)


async def test_an_exception_is_the_answer_of_its_replica() -> None:
    error = TargetError("stuck")
    assert await ask_all(Handle(error, "b"), "state") == [error, "b"]
    [died] = await ask_all(Handle(ActorDiedError()), "state")
    assert isinstance(died, ActorDiedError)


async def test_a_replica_that_ends_during_its_call_does_not_end_the_callers_task() -> None:
    """Serve raises CancelledError then."""
    ended, answer = await ask_all(Handle(asyncio.CancelledError(), "b"), "state")
    assert isinstance(ended, TargetError)
    assert answer == "b"


async def test_a_caller_that_is_cancelled_ends() -> None:
    asking = asyncio.create_task(ask_all(Handle(None), "state", timeout_s=60))
    for _ in range(5):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()


async def test_no_replica_is_no_answer() -> None:
    error = DeploymentUnavailableError(DeploymentID("Router"))
    assert await ask_all(Handle(error=error), "state") == []


async def test_serve_that_does_not_know_its_replicas_is_late() -> None:
    [late] = await ask_all(Handle(is_stuck=True), "state", timeout_s=0.05)
    assert isinstance(late, TimeoutError)
