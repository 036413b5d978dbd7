"""The Routers over Serve's handle: broadcasts to all replicas, and where a request's outputs are expected."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.transport import InboxAddress, Outbox
from deployments.ingress.router_client import ServeRouters
from deployments.router.delivery import Delivery
from deployments.router.generation import Generation
from engine.errors import CapacityError, TargetError
from engine.sequence import RequestOutput
from tests.deployments.fakes import generation


class Handle:
    """Serve's handle, of which every replica answers a broadcast alike."""

    def __init__(self, *answers: Any, is_late: bool = False) -> None:
        self._answers = answers
        self._is_late = is_late
        self.generate = self
        self.num_lost = 0

    def options(self, **_: Any) -> "Handle":
        return self

    def broadcast(self, _: str) -> "Handle":
        return self

    async def results_async(self, **_: Any) -> Any:
        if self._is_late:
            raise TimeoutError
        return self._answers

    def remote(self, request: Generation, address: InboxAddress) -> "Response":
        self.num_lost -= 1
        return Response(request, address, is_lost=self.num_lost >= 0)


class Response:
    """A Router's generator, as Serve's handle gives it: it sends one output to the inbox, and says so."""

    def __init__(self, request: Generation, address: InboxAddress, *, is_lost: bool) -> None:
        self._items = self._generate(request, address, is_lost)

    @staticmethod
    async def _generate(request: Generation, address: InboxAddress, is_lost: bool) -> AsyncIterator[int]:
        if is_lost:
            raise ActorDiedError
        delivery = Delivery(Outbox(address))
        await delivery.put([RequestOutput(f"{request.request_id}-0", [1], "x", "length", None, None, 3, 0, 0, 0)])
        yield 1

    def __aiter__(self) -> AsyncIterator[int]:
        return self._items

    def cancel(self) -> None:
        pass


async def routers(*answers: Any, is_late: bool = False) -> ServeRouters:
    return await ServeRouters.open(Handle(*answers, is_late=is_late), "127.0.0.1", "tiny")


async def test_outputs_come_from_the_router_that_took_the_request() -> None:
    client = await routers()
    outputs = client.generate(generation())
    assert [output.text for output in await outputs.next()] == ["x"]
    assert await outputs.next() == []
    await outputs.close()


async def test_one_replica_that_makes_progress_is_enough() -> None:
    await (await routers(TargetError("stuck"), None)).check_progress()
    with pytest.raises(TargetError, match="stuck"):
        await (await routers(TargetError("stuck"), TargetError("stuck"))).check_progress()
    with pytest.raises(CapacityError, match="no Router answered"):
        await (await routers(is_late=True)).check_progress()
    with pytest.raises(CapacityError, match="no Router is running"):
        await (await routers()).check_progress()


async def test_metrics_are_those_of_the_ingress_and_of_the_replicas_that_answer() -> None:
    [first, *rest] = await (await routers(["metric"], TargetError("gone"))).collect()
    assert [metric.name for metric in first] == [
        "paceline:resubmissions",
        "paceline:requests_started",
        "paceline:requests_ended",
    ]
    assert rest == [["metric"]]


async def test_a_request_whose_router_is_lost_goes_to_another() -> None:
    client = await routers([])
    client._generate.num_lost = 1
    outputs = client.generate(generation(n=2))
    assert [output.text for output in await outputs.next()] == ["x"]
    await outputs.close()
    samples = [sample for metric in (await client.collect())[0] for sample in metric.samples]
    assert {sample.name: sample.value for sample in samples if not sample.name.endswith("_created")} == {
        "paceline:resubmissions_total": 1,
        "paceline:requests_started_total": 1,
        "paceline:requests_ended_total": 1,
    }
