"""The outputs of a request, which come by one way, and its end, which comes by another: in whatever order."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from cluster.protocol.messages import MalformedMessageError
from deployments.ingress import arrivals as arrivals_module
from deployments.ingress.arrivals import Arrivals, ServeOutputs
from deployments.ingress.router_loads import RouterLoads
from deployments.router.delivery import encode
from deployments.router.generation import Failure, WithdrawnError
from deployments.router.load import Load
from engine.errors import CapacityError, QueueFullError, TargetError
from engine.sequence import RequestOutput


def output(token: int, sequence: str = "a-0") -> RequestOutput:
    return RequestOutput(sequence, [token], "x", None, None, None, 3, 0, 0, 0)


class Response:
    """Serve's response generator: what it yields, how it ends, and whether it was cancelled."""

    def __init__(self, *num_sent: int | Failure, error: BaseException | None = None, is_open: bool = False) -> None:
        self._items = self._yield(num_sent, error)
        self.may_end = asyncio.Event()
        if not is_open:
            self.may_end.set()
        self.num_cancels = 0

    async def _yield(self, num_sent: tuple[int | Failure, ...], error: BaseException | None) -> AsyncIterator[Any]:
        await self.may_end.wait()
        for number in num_sent:
            yield number
        if error is not None:
            raise error

    def __aiter__(self) -> AsyncIterator[int | Exception]:
        return self._items

    def cancel(self) -> None:
        self.num_cancels += 1


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_outputs_are_those_that_have_come_since_the_last() -> None:
    arrivals, response = Arrivals(RouterLoads()), Response(3, is_open=True)
    outputs = ServeOutputs(response, "a", arrivals)
    arrivals.deliver(encode(output(1)))
    arrivals.deliver(encode(output(2)))
    assert await outputs.next() == [output(1), output(2)]
    waiting = asyncio.create_task(outputs.next())
    await settle()
    assert not waiting.done()
    arrivals.deliver(encode(output(3)))
    assert await waiting == [output(3)]
    response.may_end.set()
    assert [await outputs.next(), await outputs.next()] == [[], []]


async def test_outputs_after_the_end_are_waited_for() -> None:
    arrivals = Arrivals(RouterLoads())
    outputs = ServeOutputs(Response(2), "a", arrivals)
    arrivals.deliver(encode(output(1)))
    await settle()
    assert await outputs.next() == [output(1)]
    waiting = asyncio.create_task(outputs.next())
    await settle()
    assert not waiting.done()
    arrivals.deliver(encode(output(2)))
    assert await waiting == [output(2)]
    assert await outputs.next() == []


async def test_an_error_comes_after_the_outputs_before_it_and_is_the_one_that_the_router_raised() -> None:
    arrivals = Arrivals(RouterLoads())
    wrapped = RayTaskError("generate", "a traceback", QueueFullError("full")).as_instanceof_cause()
    outputs = ServeOutputs(Response(1, error=wrapped), "a", arrivals)
    await settle()
    arrivals.deliver(encode(output(1)))
    assert await outputs.next() == [output(1)]
    with pytest.raises(QueueFullError) as error:
        await outputs.next()
    assert str(error.value) == "full"


async def test_a_failure_is_raised_after_the_outputs_before_it() -> None:
    arrivals = Arrivals(RouterLoads())
    outputs = ServeOutputs(Response(1, Failure(QueueFullError("full"))), "a", arrivals)
    await settle()
    arrivals.deliver(encode(output(1)))
    assert await outputs.next() == [output(1)]
    with pytest.raises(QueueFullError, match="full"):
        await outputs.next()


async def test_a_load_is_noted() -> None:
    loads = RouterLoads()
    Arrivals(loads).deliver(encode(Load("here", 3, 1, 2.0, 1)))
    assert loads.depth("here") == 2


@pytest.mark.parametrize("is_closed", [True, False])
async def test_the_end_is_told_once_closed_or_not(is_closed: bool) -> None:
    ends: list[str] = []
    response = Response(0, is_open=is_closed)
    outputs = ServeOutputs(response, "a", Arrivals(RouterLoads()))
    outputs.on_end(lambda: ends.append("a"))
    await settle()
    assert len(ends) == (not is_closed)
    await outputs.close()
    await settle()
    assert ends == ["a"]


async def test_an_error_without_outputs_is_raised_at_once() -> None:
    with pytest.raises(ValueError, match="plain"):
        await ServeOutputs(Response(error=ValueError("plain")), "a", Arrivals(RouterLoads())).next()


async def test_a_replica_that_dies_is_an_error_after_what_has_come() -> None:
    arrivals, response = Arrivals(RouterLoads()), Response(error=TargetError("dead"), is_open=True)
    outputs = ServeOutputs(response, "a", arrivals)
    arrivals.deliver(encode(output(1)))
    response.may_end.set()
    assert await outputs.next() == [output(1)]
    with pytest.raises(TargetError, match="dead"):
        await outputs.next()


async def test_a_replica_that_cancels_the_call_is_shutting_down() -> None:
    with pytest.raises(TargetError, match="shutting down"):
        await ServeOutputs(Response(error=asyncio.CancelledError()), "a", Arrivals(RouterLoads())).next()


async def test_an_error_may_also_come_as_an_item() -> None:
    with pytest.raises(WithdrawnError):
        await ServeOutputs(Response(Failure(WithdrawnError("gone"))), "a", Arrivals(RouterLoads())).next()


async def test_who_refused_a_request_is_known_with_the_error() -> None:
    outputs = ServeOutputs(Response(Failure(QueueFullError("full"), "a")), "a", Arrivals(RouterLoads()))
    assert outputs.refused_by is None
    with pytest.raises(QueueFullError):
        await outputs.next()
    assert outputs.refused_by == "a"


async def test_only_requests_that_wait_are_withdrawn() -> None:
    arrivals, responses = Arrivals(RouterLoads()), {key: Response(1, is_open=True) for key in "abc"}
    requests = {key: ServeOutputs(response, key, arrivals) for key, response in responses.items()}
    arrivals.deliver(encode(output(1, "a-0")))
    assert arrivals.withdraw(["a", "b", "unknown"]) == 1
    with pytest.raises(WithdrawnError, match="stopped"):
        await requests["b"].next()
    assert await requests["a"].next() == [output(1, "a-0")]
    assert requests["c"].is_waiting
    assert arrivals.withdraw(["b"]) == 0
    for request in requests.values():
        await request.close()


async def test_a_request_waits_until_its_first_output_or_its_end() -> None:
    arrivals, response = Arrivals(RouterLoads()), Response(1, is_open=True)
    assert not arrivals.has_waiting(0.0)
    first = ServeOutputs(response, "a", arrivals)
    assert arrivals.has_waiting(0.0)
    assert not arrivals.has_waiting(100.0)
    arrivals.deliver(encode(output(1)))
    assert not arrivals.has_waiting(0.0)
    ended = ServeOutputs(Response(error=QueueFullError("full")), "b", arrivals)
    await settle()
    assert not arrivals.has_waiting(0.0)
    for outputs in (first, ended):
        await outputs.close()


async def test_all_requests_can_be_ended_with_an_error_after_what_has_come() -> None:
    arrivals, responses = Arrivals(RouterLoads()), [Response(1, is_open=True) for _ in range(2)]
    first = ServeOutputs(responses[0], "a", arrivals)
    arrivals.deliver(encode(output(1)))
    arrivals.end(CapacityError("too late"))
    assert await first.next() == [output(1)]
    later = ServeOutputs(responses[1], "b", arrivals)
    responses[0].may_end.set()
    await settle()
    for outputs in (first, later):
        with pytest.raises(CapacityError, match="too late"):
            await outputs.next()
        await outputs.close()


async def test_outputs_that_were_sent_and_do_not_come_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals_module, "LAST_OUTPUTS_TIMEOUT_S", 0.05)
    arrivals, response = Arrivals(RouterLoads()), Response(2, is_open=True)
    outputs = ServeOutputs(response, "a", arrivals)
    waiting = asyncio.create_task(outputs.next())
    await settle()
    response.may_end.set()
    arrivals.deliver(encode(output(1)))
    assert await waiting == [output(1)]
    with pytest.raises(TargetError, match="connection to the Router was lost"):
        await outputs.next()


async def test_outputs_of_requests_that_are_closed_or_unknown_are_dropped() -> None:
    arrivals, response = Arrivals(RouterLoads()), Response(is_open=True)
    outputs = ServeOutputs(response, "a", arrivals)
    await settle()
    arrivals.deliver(encode(output(1, "b-0")))
    await outputs.close()
    arrivals.deliver(encode(output(1)))
    assert response.num_cancels == 1
    assert outputs._outputs == []
    with pytest.raises(MalformedMessageError):
        arrivals.deliver(b"\xc1")


async def test_each_sequence_of_a_request_comes_to_it() -> None:
    arrivals = Arrivals(RouterLoads())
    outputs = ServeOutputs(Response(3), "a-b", arrivals)
    for index in (0, 1, 12):
        arrivals.deliver(encode(output(index, f"a-b-{index}")))
    assert [one.token_ids for one in await outputs.next()] == [[0], [1], [12]]
