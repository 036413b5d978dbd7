"""The Routers over Serve's handle: what they raise arrives as they raised it, and a closed request is cancelled."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from deployments.ingress.router_client import ServeOutputs, ServeRouters
from engine.errors import CapacityError, QueueFullError, TargetError
from engine.sequence import RequestOutput

OUTPUT = RequestOutput("a-0", [1], "x", None, None, None, 3, 0, 0, 0)


class Response:
    """Serve's response generator: what it yields, how it ends, and whether it was cancelled."""

    def __init__(self, *outputs: list[RequestOutput], error: BaseException | None = None) -> None:
        self._items = self._yield(outputs, error)
        self.num_cancels = 0

    @staticmethod
    async def _yield(outputs: Any, error: BaseException | None) -> AsyncIterator[list[RequestOutput]]:
        for output in outputs:
            yield output
        if error is not None:
            raise error

    def __aiter__(self) -> "Response":
        return self

    async def __anext__(self) -> list[RequestOutput]:
        return await anext(self._items)

    def cancel(self) -> None:
        self.num_cancels += 1


async def test_an_empty_list_follows_the_last_outputs() -> None:
    outputs = ServeOutputs(Response([OUTPUT]))
    assert [await outputs.next(), await outputs.next(), await outputs.next()] == [[OUTPUT], [], []]


async def test_an_error_is_the_one_that_the_router_raised() -> None:
    wrapped = RayTaskError("generate", "a traceback", QueueFullError("full")).as_instanceof_cause()
    with pytest.raises(QueueFullError) as error:
        await ServeOutputs(Response(error=wrapped)).next()
    assert str(error.value) == "full"
    with pytest.raises(ValueError, match="plain"):
        await ServeOutputs(Response(error=ValueError("plain"))).next()


async def test_a_replica_that_cancels_the_call_is_shutting_down() -> None:
    with pytest.raises(TargetError, match="shutting down"):
        await ServeOutputs(Response(error=asyncio.CancelledError())).next()


async def test_closing_cancels_the_call() -> None:
    response = Response([OUTPUT])
    outputs = ServeOutputs(response)
    await outputs.next()
    await outputs.close()
    assert response.num_cancels == 1


class Handle:
    """Serve's handle, of which every replica answers a broadcast alike."""

    def __init__(self, *answers: Any, is_late: bool = False) -> None:
        self._answers = answers
        self._is_late = is_late
        self.generate = self

    def options(self, **_: Any) -> "Handle":
        return self

    def broadcast(self, _: str) -> "Handle":
        return self

    async def results_async(self, **_: Any) -> Any:
        if self._is_late:
            raise TimeoutError
        return self._answers


async def test_one_replica_that_makes_progress_is_enough() -> None:
    await ServeRouters(Handle(TargetError("stuck"), None)).check_progress()
    with pytest.raises(TargetError, match="stuck"):
        await ServeRouters(Handle(TargetError("stuck"), TargetError("stuck"))).check_progress()
    with pytest.raises(CapacityError, match="no Router answered"):
        await ServeRouters(Handle(is_late=True)).check_progress()


async def test_metrics_are_those_of_the_replicas_that_answer() -> None:
    assert await ServeRouters(Handle(["metric"], TargetError("gone"))).collect() == [["metric"]]
