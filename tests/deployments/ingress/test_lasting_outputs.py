"""Requests whose Routers are lost at every point: what comes is what one Router would have sent.

| mutant | caught by |
|---|---|
| the tokens received are not sent with the request | test_a_request_goes_on_where_its_router_was_lost |
| finished choices are generated again | test_a_request_goes_on_where_its_router_was_lost |
| the request is sent again under its own id | test_outputs_of_the_lost_router_that_come_late_are_dropped |
| the whole time limit counts for each Router | test_the_deadline_is_that_of_the_first_submission |
| a request that ends its Routers is sent again for ever | test_a_request_that_ends_every_router_is_given_up |
| a Router that ends a call too early has finished the request | test_a_call_that_ends_before_its_request_is_a_loss |
| a Router that refuses is asked again before the others | test_each_router_is_asked_once_until_all_have_refused |
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.ingress import lasting_outputs
from deployments.ingress.answer import Outputs
from deployments.ingress.draining import ShutdownError
from deployments.ingress.lasting_outputs import LastingOutputs
from deployments.openai.choices import Choice
from deployments.router.generation import Generation, WithdrawnError, choice_index
from engine.errors import QueueFullError, RequestError, TargetError
from engine.sequence import RequestOutput
from tests.deployments.fakes import LocalOutputs, LocalRouters, Rig, generation

LOSSES = [
    ActorDiedError(),
    ActorUnavailableError("gone", None),
    AioRpcError(grpc.StatusCode.CANCELLED, Metadata(), Metadata()),
    DeploymentUnavailableError(DeploymentID("Router", "paceline")),
    TargetError("the replica is shutting down"),
]


class Lost:
    """Outputs of a Router that is lost after some deliveries."""

    refused_by = None

    def __init__(self, outputs: Outputs, after: int, error: Exception) -> None:
        self._outputs = outputs
        self._num_left = after
        self._error = error
        self.is_closed = False

    async def next(self) -> list[RequestOutput]:
        if not self._num_left:
            raise self._error
        self._num_left -= 1
        return await self._outputs.next()

    async def close(self) -> None:
        self.is_closed = True
        await self._outputs.close()


class Routers:
    """Routers of which each but the last is lost after the number of deliveries given for it."""

    def __init__(self, rig: Rig, *lost_after: int, error: Exception = LOSSES[0]) -> None:
        self._local = LocalRouters(rig)
        self._lost_after = [*lost_after]
        self._error = error
        self.submitted: list[Generation] = []
        self.lost: list[Lost] = []
        self.reasons: Counter[str] = Counter()

    def open(self, request: Generation) -> LastingOutputs:
        return LastingOutputs(request, self._submit, self._count, lambda _: False)

    def _submit(self, request: Generation) -> Outputs:
        self.submitted.append(request)
        outputs = LocalOutputs(self._local, request)
        if not self._lost_after:
            return outputs
        self.lost.append(Lost(outputs, self._lost_after.pop(0), self._error))
        return self.lost[-1]

    def _count(self, reason: str) -> None:
        self.reasons[reason] += 1


class Fixed:
    """Outputs that are given, and then an error, the end, or none for ever."""

    def __init__(
        self,
        *outputs: RequestOutput,
        error: Exception | None = None,
        refused_by: str | None = None,
        ends: bool = False,
    ) -> None:
        self._outputs = [*([output] for output in outputs), *([[]] if ends else [])]
        self._error = error
        self.refused_by = refused_by

    async def next(self) -> list[RequestOutput]:
        if self._outputs:
            return self._outputs.pop(0)
        if self._error is None:
            await asyncio.Event().wait()
        assert self._error is not None
        raise self._error

    async def close(self) -> None:
        pass


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.loop.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_outputs, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(lasting_outputs, "LONGEST_PAUSE_S", 0.002)


async def choices_of(outputs: Outputs, num_choices: int) -> list[Choice]:
    choices = [Choice(index, [1, 2, 3]) for index in range(num_choices)]
    while batch := await outputs.next():
        for output in batch:
            choices[choice_index(output.request_id)].append(output)
    await outputs.close()
    return choices


def contents(choices: list[Choice]) -> list[Any]:
    return [(c.text, c.token_ids, c.logprobs, c.prompt_logprobs, c.finish_reason, c.stop_reason) for c in choices]


REQUESTS: dict[str, Callable[[], Generation]] = {
    "greedy": generation,
    "drawn": lambda: generation(temperature=1.0, seed=3, logprobs=2),
    "without a seed": lambda: generation(temperature=1.0, n=2),
    "several prompts and choices": lambda: generation(num_prompts=2, n=3, temperature=1.0, seed=1),
    "a prompt's scores": lambda: generation(prompt_logprobs=1, logprobs=0),
    "penalties": lambda: generation(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
    "a stop string": lambda: generation(stop=["zzz", "U"], max_tokens=30),
    "a least length": lambda: generation(min_tokens=6, stop_token_ids=list(range(0, 94, 2)), max_tokens=30),
    "ends at different times": lambda: generation(
        n=4, temperature=3.0, seed=5, stop_token_ids=list(range(0, 94, 5)), max_tokens=30
    ),
}


@pytest.mark.parametrize("lost_after", [(0,), (1,), (2,), (5,), (1, 0, 2, 1)], ids=str)
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_goes_on_where_its_router_was_lost(rig: Rig, name: str, lost_after: tuple[int, ...]) -> None:
    request = REQUESTS[name]()
    expected = await choices_of(Routers(rig).open(request), request.num_choices)
    routers = Routers(rig, *lost_after)
    assert contents(await choices_of(routers.open(request), request.num_choices)) == contents(expected)
    assert routers.reasons == {"router_lost": len(routers.lost)} == {"router_lost": len(routers.submitted) - 1}
    assert all(lost.is_closed for lost in routers.lost)
    assert rig.engine.num_free_blocks == rig.engine.num_blocks
    for again in routers.submitted[1:]:
        tokens = [expected[choice].token_ids for choice in again.output_token_ids]
        assert all(
            whole[: len(part)] == part for whole, part in zip(tokens, again.output_token_ids.values(), strict=True)
        )


@pytest.mark.parametrize("error", LOSSES, ids=lambda error: type(error).__name__)
async def test_a_lost_router_is_one_that_another_may_replace(rig: Rig, error: Exception) -> None:
    routers = Routers(rig, 2, error=error)
    [choice] = await choices_of(routers.open(generation()), 1)
    assert (len(choice.token_ids), routers.reasons.total()) == (8, 1)


@pytest.mark.parametrize("error", [RequestError("bad"), QueueFullError("full"), ValueError("bug"), TimeoutError()])
async def test_what_the_request_causes_is_passed_on(rig: Rig, error: Exception) -> None:
    routers = Routers(rig, 0, error=error)
    with pytest.raises(type(error)):
        await routers.open(generation()).next()
    assert len(routers.submitted) == 1


async def test_a_shutdown_ends_a_request_that_was_resubmitted_too() -> None:
    first = RequestOutput("a-0", [1], "x", None, None, None, 3, 0, 0, 0)
    parts = [Fixed(first, error=ActorDiedError()), Fixed(error=ShutdownError("over"))]
    outputs = LastingOutputs(generation(), lambda _: parts.pop(0), lambda _: None, lambda _: False)
    assert await outputs.next() == [first]
    with pytest.raises(ShutdownError):
        await outputs.next()


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_that_is_withdrawn_moves_at_once_and_then_rests(
    rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting_outputs, "FIRST_PAUSE_S", 1000.0)
    request = REQUESTS[name]()
    expected = await choices_of(Routers(rig).open(request), request.num_choices)
    routers = Routers(rig, 0, error=WithdrawnError("another Router has less to do"))
    assert contents(await choices_of(routers.open(request), request.num_choices)) == contents(expected)
    assert routers.reasons == {"moved": 1}
    assert [sent.rest_s for sent in routers.submitted] == [0.0, lasting_outputs.REST_S]
    assert routers.submitted[1].timeout_s <= request.timeout_s


@pytest.mark.parametrize(
    "error", [QueueFullError("full"), BackPressureError(num_queued_requests=1, max_queued_requests=1)]
)
async def test_a_request_that_was_admitted_waits_for_a_place_at_another_router(error: Exception) -> None:
    last = RequestOutput("a-0", [2], "y", "length", None, None, 3, 0, 0, 0)
    first = RequestOutput("a-0", [1], "x", None, None, None, 3, 0, 0, 0)
    parts = [Fixed(first, error=ActorDiedError()), Fixed(error=error), Fixed(error=error), Fixed(last)]
    reasons: list[str] = []
    outputs = LastingOutputs(generation(), lambda _: parts.pop(0), reasons.append, lambda _: False)
    assert [await outputs.next(), await outputs.next()] == [[first], [last]]
    assert reasons == ["router_lost", "queue_full", "queue_full"]


async def test_a_loss_after_the_last_token_needs_no_router() -> None:
    last = RequestOutput("a-0", [1], "x", "length", None, None, 3, 0, 0, 0)
    parts = [Fixed(last, error=ActorDiedError())]
    outputs = LastingOutputs(generation(), lambda _: parts.pop(0), lambda _: None, lambda _: False)
    assert [await outputs.next(), await outputs.next()] == [[last], []]


async def test_a_call_that_ends_before_its_request_is_a_loss() -> None:
    first = RequestOutput("a-0", [1], "x", None, None, None, 3, 0, 0, 0)
    last = RequestOutput("a-0", [2], "y", "length", None, None, 3, 0, 0, 0)
    parts = [Fixed(first, ends=True), Fixed(ends=True), Fixed(last, ends=True)]
    reasons: list[str] = []
    outputs = LastingOutputs(generation(), lambda _: parts.pop(0), reasons.append, lambda _: False)
    assert [await outputs.next() for _ in range(3)] == [[first], [last], []]
    assert reasons == ["target_lost", "target_lost"]


class Refusing:
    """Routers of which the one with the first name that has not refused yet is asked, and refuses."""

    def __init__(self, *names: str, error: Exception) -> None:
        self._names = names
        self._error = error
        self.asked: list[str] = []
        self.reasons: list[str] = []
        self.free: str | None = None

    def open(self, request: Generation) -> LastingOutputs:
        return LastingOutputs(request, self._submit, self.reasons.append, lambda names: not {*self._names} <= names)

    def _submit(self, request: Generation) -> Fixed:
        names = [name for name in self._names if name not in request.refused_by] or [*self._names]
        self.asked.append(names[0])
        if names[0] == self.free:
            return Fixed(RequestOutput("a-0", [1], "x", "length", None, None, 3, 0, 0, 0))
        return Fixed(error=self._error, refused_by=names[0])


@pytest.mark.parametrize("error", [QueueFullError("full"), TargetError("another target")])
@pytest.mark.parametrize("free", "abc")
async def test_a_request_that_one_router_refuses_goes_to_another_at_once(
    error: Exception, free: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting_outputs, "FIRST_PAUSE_S", 1000.0)
    routers = Refusing("a", "b", "c", error=error)
    routers.free = free
    [output] = await routers.open(generation()).next()
    assert output.token_ids == [1]
    assert routers.asked == [*"abc"[: "abc".index(free) + 1]]
    assert routers.reasons == ["refused"] * (len(routers.asked) - 1)


@pytest.mark.parametrize("num_routers", [1, 2, 3, 9])
async def test_a_client_hears_that_all_are_full_after_a_few_were_asked(num_routers: int) -> None:
    routers = Refusing(*map(str, range(num_routers)), error=QueueFullError("full"))
    with pytest.raises(QueueFullError):
        await routers.open(generation()).next()
    assert len(routers.asked) == min(num_routers, lasting_outputs.MAX_REFUSALS)


async def test_each_router_is_asked_once_until_all_have_refused() -> None:
    """A request of another target waits for a Router of that, and one that was admitted for a place."""
    routers = Refusing("a", "b", error=TargetError("another target"))
    outputs = routers.open(generation())
    waiting = asyncio.create_task(outputs.next())
    while len(routers.asked) < 6:
        await asyncio.sleep(0)
    assert routers.asked[:6] == ["a", "b"] * 3
    assert routers.reasons[:5] == ["refused", "target_lost"] * 2 + ["refused"]
    routers.free = "b"
    assert [output.token_ids for output in await waiting] == [[1]]


async def test_outputs_of_the_lost_router_that_come_late_are_dropped(rig: Rig) -> None:
    """They are known by the request's id, which is another one at the next Router."""
    routers = Routers(rig, 1, 1)
    await choices_of(routers.open(generation()), 1)
    assert [request.request_id for request in routers.submitted] == ["request", "request~1", "request~2"]


async def test_the_deadline_is_that_of_the_first_submission(rig: Rig) -> None:
    routers = Routers(rig, 1)
    outputs = routers.open(generation(timeout_s=50.0))
    await outputs.next()
    await asyncio.sleep(0.05)
    await outputs.next()
    assert routers.submitted[0].timeout_s == 50.0
    assert routers.submitted[1].timeout_s <= 49.95
    await outputs.close()


async def test_a_request_that_no_router_takes_ends_at_its_deadline_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lasting_outputs, "GRACE_S", 0.01)
    waiting = LastingOutputs(generation(timeout_s=0.02), lambda _: Fixed(), lambda _: None, lambda _: False)
    with pytest.raises(TimeoutError, match=r"longer than 0\.02 s"):
        await waiting.next()
    refused = LastingOutputs(
        generation(timeout_s=0.02), lambda _: Fixed(error=LOSSES[3]), lambda _: None, lambda _: False
    )
    with pytest.raises(TimeoutError, match=r"longer than 0\.02 s"):
        await refused.next()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_a_request_that_ends_every_router_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_outputs, "SHORTEST_LOSS_S", 0.0)
    reasons: list[str] = []
    outputs = LastingOutputs(generation(), lambda _: Fixed(error=TargetError("again")), reasons.append, lambda _: False)
    with pytest.raises(TargetError, match="again"):
        await outputs.next()
    assert len(reasons) == lasting_outputs.MAX_LOSSES


async def test_waiting_can_be_cancelled_and_loses_nothing(rig: Rig) -> None:
    """As a stream does that sends a comment meanwhile."""
    rig.verifier.gate.clear()
    routers = Routers(rig, 0)
    outputs = routers.open(generation())
    waiting = asyncio.create_task(outputs.next())
    while not routers.submitted[1:]:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(routers.submitted) == 2
