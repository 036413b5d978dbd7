"""The Routers over Serve's handle: broadcasts to all replicas, and where a request's outputs are expected."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError

from cluster.transport import InboxAddress, Outbox
from deployments.ingress import router_client
from deployments.ingress.lasting_outputs import REST_S
from deployments.ingress.router_client import ServeRouters
from deployments.ingress.router_loads import RouterLoads
from deployments.metrics import ReplicaMetrics
from deployments.router.delivery import Delivery
from deployments.router.generation import Description, Generation, ModelLimits, QueueReport
from deployments.router.load import Load
from deployments.router.state import RouterState
from engine.config import ModelInfo
from engine.errors import TargetError
from engine.sequence import RequestOutput
from tests.deployments.fakes import generation
from tests.deployments.ingress.test_broadcast import Call

INFO = ModelInfo("tiny", 9, 9, [0], 1000, "float32", "cpu")


class Handle:
    """Serve's handle, of which every replica answers a broadcast alike."""

    def __init__(self, *answers: Any) -> None:
        self._answers = answers
        self.generate = self.describe = self
        self.num_lost = self.num_stuck = 0
        self.broadcasts: list[Any] = []
        self.descriptions: list[Description | BaseException] = []
        self.submitted: list[Generation] = []

    def options(self, **_: Any) -> "Handle":
        return self

    def broadcast(self, *call: Any) -> "Handle":
        self.broadcasts.append(call)
        return self

    async def _fetch_replica_results_async(self) -> list[Call]:
        return [Call(answer) for answer in self._answers]

    def remote(self, *call: Any) -> Any:
        return self._submit(*call) if call else self._describe()

    async def _describe(self) -> Description:
        description = self.descriptions.pop(0)
        if isinstance(description, BaseException):
            raise description
        return description

    def _submit(self, request: Generation, address: InboxAddress) -> "Response":
        self.submitted.append(request)
        self.num_lost -= 1
        self.num_stuck -= 1
        return Response(request, address, is_lost=self.num_lost >= 0, is_stuck=self.num_stuck >= 0)


class Response:
    """A Router's generator, as Serve's handle gives it: it sends one output to the inbox, and says so."""

    def __init__(self, request: Generation, address: InboxAddress, *, is_lost: bool, is_stuck: bool) -> None:
        self._items = self._generate(request, address, is_lost, is_stuck)

    @staticmethod
    async def _generate(
        request: Generation, address: InboxAddress, is_lost: bool, is_stuck: bool
    ) -> AsyncIterator[int]:
        if is_lost:
            raise ActorDiedError
        if is_stuck:
            await asyncio.Event().wait()
        delivery = Delivery(Outbox(address))
        await delivery.put([RequestOutput(f"{request.request_id}-0", [1], "x", "length", None, None, 3, 0, 0, 0)])
        yield 1

    def __aiter__(self) -> AsyncIterator[int]:
        return self._items

    def cancel(self) -> None:
        pass


@pytest.fixture(autouse=True)
def ingresses(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every Ingress answers, of which the tested one is the first."""
    answers: list[Any] = []
    context = SimpleNamespace(replica_tag="i1", deployment="Ingress", app_name="default")
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: Handle(*answers))
    return answers


async def routers(*answers: Any) -> ServeRouters:
    return await ServeRouters.open(Handle(*answers), "127.0.0.1", "tiny")


async def test_outputs_come_from_the_router_that_took_the_request() -> None:
    client = await routers()
    outputs = client.generate(generation())
    assert [output.text for output in await outputs.next()] == ["x"]
    assert await outputs.next() == []
    await outputs.close()


async def test_only_routers_of_the_same_target_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a new target is rolled out, Routers of the old one still run."""
    monkeypatch.setattr("deployments.ingress.router_client.RETRY_PAUSE_S", 0.0)
    handle = Handle()
    old, new = (Description(INFO, None, ModelLimits(9, 9, 4), 9, target_id=path) for path in ("/old", "/new"))
    handle.descriptions = [old, old, new]
    client = await ServeRouters.open(handle, "127.0.0.1", "tiny", target="/new")
    assert await client.describe() == new
    await client.generate(generation()).close()
    assert [request.target_id for request in handle.submitted] == ["/new"]


@pytest.mark.parametrize("error", [ActorDiedError(), asyncio.CancelledError()])
async def test_a_router_that_ends_while_it_is_asked_what_it_serves_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(router_client, "RETRY_PAUSE_S", 0.0)
    handle, served = Handle(), Description(INFO, None, ModelLimits(9, 9, 4), 9)
    handle.descriptions = [error, served]
    client = await ServeRouters.open(handle, "127.0.0.1", "tiny")
    assert await client.describe() == served


async def test_requests_that_wait_leave_a_router_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = RouterLoads()
    monkeypatch.setattr(router_client, "LOADS", loads)
    handle = Handle()
    client = await ServeRouters.open(handle, "127.0.0.1", "tiny")
    handle.num_stuck = 1
    outputs = client.generate(generation())
    answer = asyncio.create_task(outputs.next())
    await asyncio.sleep(0)
    loads.assign("request", "stopped")
    loads.set_routers(["new"])
    loads.report(Load("stopped", 1, 1, 1.0, 1, ("request", "of another time")))
    assert client.leave_stopped() == 0, "it is not known how many requests a Router holds"
    handle.descriptions = [Description(INFO, None, ModelLimits(9, 9, 4), capacity=9)]
    await client.describe()
    assert client.leave_stopped() == 1
    assert [output.text for output in await answer] == ["x"]
    assert client.leave_stopped() == 0, "the request has another name now"
    assert [(request.request_id, request.rest_s) for request in handle.submitted] == [
        ("request", 0.0),
        ("request~1", REST_S),
    ]
    await outputs.close()


async def test_the_state_of_every_router_is_asked_for() -> None:
    answers = [RouterState("r1", None), TargetError("gone")]
    assert await (await routers(*answers)).states() == answers


async def test_metrics_are_those_of_all_ingresses_and_of_all_routers(ingresses: list[Any]) -> None:
    ingresses += [ReplicaMetrics("i2", []), TimeoutError()]
    client = await routers(ReplicaMetrics("r1", []), TargetError("gone"), ReplicaMetrics("r2", []))
    assert [replica.replica for replica in await client.collect()] == ["i1", "i2", "r1", "r2"]


async def test_metrics_of_an_ingress_are_there_without_any_router() -> None:
    [own] = await (await routers()).collect()
    names = ["paceline:resubmissions", "paceline:requests_started", "paceline:requests_ended"]
    assert (own.replica, [metric.name for metric in own.metrics]) == ("i1", names)


async def test_queues_are_reported_and_withdrawn_from_by_one_replica_of_all() -> None:
    report = QueueReport("a", 3, 2, 1, True)
    client = await routers(report, TargetError("gone"))
    assert await client.report_queues() == [report]
    client = await routers(0, TargetError("gone"), 2)
    assert await client.withdraw("a", 5) == 2
    assert client._handle.broadcasts == [("withdraw", "a", client._inbox.address, 5)]


async def test_a_request_whose_router_is_lost_goes_to_another() -> None:
    client = await routers([])
    client._generate.num_lost = 1
    outputs = client.generate(generation(n=2))
    assert [output.text for output in await outputs.next()] == ["x"]
    await outputs.close()
    samples = [sample for metric in client.collect_here().metrics for sample in metric.samples]
    values = {sample.name: sample.value for sample in samples if sample.labels.get("reason") != "moved"}
    assert {name: value for name, value in values.items() if not name.endswith("_created")} == {
        "paceline:resubmissions_total": 1,
        "paceline:requests_started_total": 1,
        "paceline:requests_ended_total": 1,
    }
