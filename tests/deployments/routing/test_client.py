"""The Routers over Serve's handle: subscriptions, requests and their messages, moves, and calls to all replicas."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.transport import InboxAddress, Outbox
from deployments.errors import ShutdownError
from deployments.observe.metrics import ReplicaMetrics
from deployments.routing import client as router_client
from deployments.routing import resumable_stream
from deployments.routing.client import RouterCall, ServeRouters, ask_all
from deployments.routing.loads import RouterLoads
from deployments.routing.prefixes import prefix_hashes
from deployments.wire import Description, End, Generation, Message, ModelLimits, Outputs, Report, encode
from engine.config import ModelInfo
from engine.errors import TargetError
from tests.deployments.fakes import generation, output
from tests.waiting import wait_for

INFO = ModelInfo("tiny", 9, 9, [0], 1000, "float32", "cpu")
SERVED = Description(INFO, None, ModelLimits(9, 9, 4), capacity=9)


class Handle:
    """Serve's handle, with its real response, to replicas that give these answers; None never comes."""

    def __init__(self, *answers: Any, error: BaseException | None = None, is_stuck: bool = False) -> None:
        self._answers, self._error, self._is_stuck = answers, error, is_stuck
        self.generate = self.describe = self
        self.num_stuck = 0
        self.is_closed = False
        self.broadcasts: list[Any] = []
        self.descriptions: list[Description | BaseException] = []
        self.submitted: list[Generation] = []

    def options(self, **_: Any) -> "Handle":
        return self

    def broadcast(self, *call: Any) -> DeploymentBroadcastResponse:
        self.broadcasts.append(call)
        return DeploymentBroadcastResponse(self._calls(), asyncio.get_running_loop())

    async def _calls(self) -> list[Any]:
        if self._is_stuck:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        return [SimpleNamespace(get_async=lambda answer=answer: self._answer(answer)) for answer in self._answers]

    async def _answer(self, answer: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        return answer

    def remote(self, *call: Any) -> Any:
        return self._submit(*call) if call else self._answer(self.descriptions.pop(0))

    def _submit(self, request: Generation, address: InboxAddress) -> "Response":
        if self.is_closed:
            raise RuntimeError("the handle is closed")
        self.submitted.append(request)
        self.num_stuck -= 1
        if self.num_stuck >= 0:
            return Response(is_stuck=True)
        last = output(1, request_id=request.request_id, finish_reason="length")
        send(address, Outputs(request.request_id, [last]))
        return Response()


def send(address: InboxAddress, *messages: Message) -> None:
    """Send messages as a Router does."""
    outbox = Outbox(address)
    for message in messages:
        outbox.post(encode(message))


class Response:
    """A Router's generator, as Serve's handle gives it: it yields nothing, and ends when it may."""

    def __init__(self, error: BaseException | None = None, *, is_stuck: bool = False) -> None:
        self._items = self._generate(error)
        self.may_end = asyncio.Event()
        self.num_cancels = 0
        if not is_stuck:
            self.may_end.set()

    async def _generate(self, error: BaseException | None) -> AsyncIterator[None]:
        await self.may_end.wait()
        if error is not None:
            raise error
        for _ in ():
            yield

    def __aiter__(self) -> AsyncIterator[None]:
        return self._items

    def cancel(self) -> None:
        self.num_cancels += 1


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> RouterLoads:
    loads = RouterLoads()
    monkeypatch.setattr(router_client, "LOADS", loads)
    return loads


@pytest.fixture(autouse=True)
def ingresses(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every Ingress answers, of which the tested one is the first."""
    answers: list[Any] = []
    context = SimpleNamespace(replica_tag="i1", deployment="Ingress", app_name="default")
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: Handle(*answers))
    return answers


async def routers(*answers: Any) -> Any:
    return await ServeRouters.open(Handle(*answers), "127.0.0.1")


async def test_outputs_come_from_the_router_that_took_the_request(loads: RouterLoads) -> None:
    client = await routers()
    stream = client.generate(generation())
    assert loads._requests
    assert [output.text for output in await stream.next()] == ["x"]
    assert await stream.next() == []
    await stream.close()
    assert client._streams == {}
    await wait_for(lambda: not loads._requests)
    send(client._address, End.by(TargetError("late"), "request"), Report("here", None, 3, 1))
    await wait_for(lambda: loads.depth("here") == 2)


async def test_a_request_that_serve_does_not_take_leaves_nothing_behind(loads: RouterLoads) -> None:
    client = await routers()
    client._handle.is_closed = True
    with pytest.raises(RuntimeError, match="closed"):
        client.generate(generation())
    assert (client._streams, loads._requests, client._metrics.num_started) == ({}, {}, 0)


async def test_only_routers_of_the_same_target_are_asked_and_believed(
    monkeypatch: pytest.MonkeyPatch, loads: RouterLoads
) -> None:
    """While a new target is rolled out, Routers of the old one still run."""
    monkeypatch.setattr(router_client, "RETRY_PAUSE_S", 0.0)
    handle = Handle()
    old, new = (Description(INFO, None, ModelLimits(9, 9, 4), 9, target_id=path) for path in ("/old", "/new"))
    handle.descriptions = [old, ActorDiedError(), asyncio.CancelledError(), new]
    client = await ServeRouters.open(handle, "127.0.0.1", target="/new")
    assert await client.describe() == new
    sent = replace(generation(), prompts=[[*range(40)], [*range(90)]], cache_salt="mine")
    client.generate(sent)
    [request] = handle.submitted
    assert request.target_id == "/new"
    assert request.prefixes == prefix_hashes(sent.prompts[0], "mine") != ()
    loads.set_routers("ab")
    loads.note(Report("a", None, target_id="/old"))
    assert client.heard() == []
    loads.note(Report("b", None, target_id="/new"))
    assert [heard.report.router for heard in client.heard()] == ["b"]


async def test_routers_that_do_not_report_are_subscribed_to(
    loads: RouterLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_client, "SUBSCRIBE_PERIOD_S", 0.01)
    client = await routers()
    await asyncio.sleep(0.03)
    assert client._handle.broadcasts == []
    loads.set_routers(["a", "b"])
    loads.note(Report("a", None))
    await wait_for(lambda: client._handle.broadcasts)
    assert client._handle.broadcasts[0] == ("subscribe", client._address)
    loads.note(Report("b", None))
    await asyncio.sleep(0.03)
    client._handle.broadcasts.clear()
    await asyncio.sleep(0.03)
    assert client._handle.broadcasts == []


async def test_requests_that_wait_leave_a_router_that_was_stopped(
    loads: RouterLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable_stream, "SHORTEST_WAIT_S", 0.0)
    client = await routers()
    handle = client._handle
    handle.num_stuck = 1
    stream = client.generate(generation())
    answer = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    loads.assign("request", "stopped")
    loads.set_routers(["new"])
    loads.note(Report("stopped", None, 1, 1, movable=("request", "of another time")))
    loads.note(Report("new", None))
    client._move()
    assert len(handle.submitted) == 1, "it is not known how many requests a Router holds"
    handle.descriptions = [SERVED]
    await client.describe()
    client._move()
    assert [output.text for output in await answer] == ["x"]
    client._move()
    assert [request.request_id for request in handle.submitted] == ["request", "request~1"]
    await stream.close()


async def test_a_shutdown_ends_all_requests_and_those_that_come_later() -> None:
    client = await routers()
    client._handle.num_stuck = 2
    streams = [client.generate(generation())]
    client.end_all(ShutdownError("over"))
    streams.append(client.generate(generation()))
    for stream in streams:
        with pytest.raises(ShutdownError):
            await stream.next()


@pytest.mark.parametrize("has_pool", [False, True])
async def test_metrics_are_those_of_all_ingresses_routers_and_drafts(
    has_pool: bool, ingresses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ingresses += [ReplicaMetrics("i2", []), TimeoutError()]
    pool, of_this_app = Handle(ReplicaMetrics("d1", [])), serve.get_deployment_handle
    monkeypatch.setattr(
        serve, "get_deployment_handle", lambda *names: pool if names[0] == "Drafts" else of_this_app(*names)
    )
    handle = Handle(ReplicaMetrics("r1", []), TargetError("gone"), ReplicaMetrics("r2", []))
    client = await ServeRouters.open(handle, "127.0.0.1", has_pool=has_pool)
    shown = [replica.replica for replica in await client.collect()]
    assert shown == ["i1", "i2", *["d1"] * has_pool, "r1", "r2"]


class Events:
    """A call, and what it has reported."""

    def __init__(self, loads: RouterLoads, error: BaseException | None = None) -> None:
        loads.begin("request", 1)
        self._loads = loads
        self.response = Response(error, is_stuck=True)
        self.failures: list[BaseException] = []
        self.streams: Any = {"request": SimpleNamespace(fail=self.failures.append)}
        self.call = RouterCall(self.response, "request", self.streams)

    @property
    def has_returned(self) -> bool:
        return not self._loads._requests

    async def end(self) -> None:
        self.response.may_end.set()
        for _ in range(5):
            await asyncio.sleep(0)


BUG = RayTaskError("generate", "a traceback", ValueError("bug")).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "leaves", "at_once", "later"),
    [
        (TargetError("dead"), False, ["dead"], []),
        (BUG, False, ["bug"], []),
        (None, False, [], ["the connection to the Router was lost"]),
        # Serve cancels the call if the Router ends, and also before it cancels the request of a client that leaves.
        (asyncio.CancelledError(), False, [], ["the replica is shutting down"]),
        (asyncio.CancelledError(), True, [], []),
    ],
    ids=["dead", "a bug", "no last outputs", "cancelled", "cancelled, for the client leaves"],
)
async def test_a_call_says_why_it_has_failed_and_first_waits_for_an_end_that_may_come(
    loads: RouterLoads,
    error: BaseException | None,
    leaves: bool,
    at_once: list[str],
    later: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("END_TIMEOUT_S", "CANCEL_PAUSE_S"):
        monkeypatch.setattr(router_client, name, 0.02)
    events = Events(loads, error)
    assert not events.has_returned
    await events.end()
    assert ([str(failure) for failure in events.failures], events.has_returned) == (at_once, True)
    if leaves:
        events.call.close(cancels=True)
    await asyncio.sleep(0.05)
    assert [str(failure) for failure in events.failures] == [*at_once, *later]


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_closed_call_reports_no_failure_and_counts_until_it_returns(
    loads: RouterLoads, cancels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_client, "END_TIMEOUT_S", 0.0)
    events = Events(loads, TargetError("dead"))
    await asyncio.sleep(0)
    events.call.close(cancels=cancels)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (events.streams, events.has_returned, events.response.num_cancels) == ({}, cancels, cancels)
    await events.end()
    await asyncio.sleep(0.01)
    assert (events.failures, events.has_returned) == ([], True)


UNAVAILABLE = DeploymentUnavailableError(DeploymentID("Router"))


@pytest.mark.parametrize(
    ("handle", "expected"),
    [
        (Handle("a", None, "b"), ["a", TimeoutError, "b"]),
        (Handle(TargetError("stuck"), asyncio.CancelledError(), "b"), [TargetError, TargetError, "b"]),
        (Handle(error=UNAVAILABLE), []),
        (Handle(error=RuntimeError("shut down")), [RuntimeError]),
        (Handle(error=asyncio.CancelledError()), [TargetError]),
        (Handle(is_stuck=True), [TimeoutError]),
    ],
    ids=["late", "failed, or ended during the call", "no replica", "Serve fails", "Serve ends", "Serve is late"],
)
async def test_each_replica_answers_for_itself_and_no_failure_ends_the_task_that_asks(
    handle: Handle, expected: list[Any]
) -> None:
    """Or an Ingress would never subscribe to a Router again."""
    answers = await ask_all(handle, "state", timeout_s=0.05)
    assert [answer if isinstance(answer, str) else type(answer) for answer in answers] == expected


async def test_a_caller_that_is_cancelled_ends() -> None:
    asking = asyncio.create_task(ask_all(Handle(None), "state", timeout_s=60))
    for _ in range(5):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()


@pytest.mark.parametrize(
    ("answers", "is_killed"), [([False, True], True), ([False], False), ([ActorDiedError()], False)]
)
async def test_a_process_is_killed_if_one_router_says_so(answers: list[Any], is_killed: bool) -> None:
    client = await routers(*answers)
    assert await client.kill("draft") is is_killed
    assert client._handle.broadcasts[-1] == ("kill", "draft")
