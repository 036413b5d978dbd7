"""Requests whose Routers are lost at every point: the client gets the text that one Router would have sent."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.ingress.draining import LAST_WORDS_S
from deployments.observe.metrics import IngressMetrics
from deployments.openai.writer import Choice
from deployments.router.delivery import Stream
from deployments.routing import resumable_stream
from deployments.routing.resumable_stream import ResumableStream, Retries
from deployments.wire import End, Generation, Outputs, choice_index
from engine.errors import QueueFullError, RequestError, TargetError
from tests.deployments.fakes import Rig, generation, output

LOSSES = [
    ActorDiedError(),
    ActorUnavailableError("gone", None),
    AioRpcError(grpc.StatusCode.CANCELLED, Metadata(), Metadata()),
    DeploymentUnavailableError(DeploymentID("Router", "paceline")),
    TargetError("the replica is shutting down"),
]


LAST = output(2, finish_reason="length")


class Call:
    """A Router's call. A script of batches of outputs, and of the error or end after them, takes the Router's place."""

    def __init__(self, stream: ResumableStream, script: list[Any], request_id: str) -> None:
        self._stream = stream
        self._request_id = request_id
        self.cancels: bool | None = None
        for event in script:
            asyncio.get_running_loop().call_soon(self._happen, event)

    def _happen(self, event: Any) -> None:
        if self.cancels is not None:
            return
        if isinstance(event, Exception):
            self._stream.fail(event)
        else:
            self._stream.put(event if isinstance(event, End) else Outputs(self._request_id, event))

    def close(self, *, cancels: bool) -> None:
        self.cancels = cancels


class LocalCall:
    """A call of a round loop in this process, which is lost after some deliveries."""

    def __init__(self, rig: Rig, request: Generation, stream: ResumableStream, lost_after: int) -> None:
        self._stream = stream
        self._num_left = lost_after
        self.cancels: bool | None = None
        self._task = asyncio.create_task(rig.loop.generate(Stream(request, self._send)))
        self._task.add_done_callback(self._end)
        if not lost_after:
            asyncio.get_running_loop().call_soon(stream.fail, LOSSES[0])

    def _send(self, outputs: Outputs) -> None:
        if self.cancels is None and self._num_left:
            self._stream.put(outputs)
            self._num_left -= 1
            if not self._num_left:
                self._stream.fail(LOSSES[0])

    def _end(self, task: asyncio.Task[None]) -> None:
        if self.cancels is None and not task.cancelled() and (error := task.exception()) is not None:
            self._stream.fail(error)

    def close(self, *, cancels: bool) -> None:
        self.cancels = cancels
        self._task.cancel()


class Routers:
    """Routers that follow their scripts, of which the last is repeated; or, with a rig, run its round loop.

    The script of a round loop is the number of deliveries after which it is lost; after the scripts, none is lost.
    """

    def __init__(self, *scripts: Any, rig: Rig | None = None) -> None:
        self._scripts, self._rig = [*scripts], rig
        self.submitted: list[Generation] = []
        self.calls: list[Call | LocalCall] = []
        self.metrics = IngressMetrics()

    def open(self, request: Generation) -> ResumableStream:
        return ResumableStream(request, self.submit, self.has_other, self.metrics)

    def has_other(self, refusing: frozenset[str]) -> bool:
        return False

    def submit(self, request: Generation, stream: ResumableStream) -> Call | LocalCall:
        self.submitted.append(request)
        if self._rig is not None:
            lost_after = self._scripts.pop(0) if self._scripts else 10**9
            self.calls.append(LocalCall(self._rig, request, stream, lost_after))
        else:
            script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
            self.calls.append(Call(stream, script, request.request_id))
        return self.calls[-1]

    @property
    def reasons(self) -> dict[str, float]:
        """The resubmissions, by reason."""
        return dict(self.metrics.resubmissions)

    @property
    def outcomes(self) -> dict[str, float]:
        """The ended requests, by outcome and reason."""
        return {" ".join(outcome).strip(): count for outcome, count in self.metrics.ended.items()}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_stream, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(resumable_stream, "LONGEST_PAUSE_S", 0.002)


async def choices_of(outputs: ResumableStream, num_choices: int) -> list[Choice]:
    choices = [Choice(index, [1, 2, 3]) for index in range(num_choices)]
    while batch := await outputs.next():
        for step in batch:
            choices[choice_index(step.request_id)].append(step)
    await outputs.close()
    return choices


def contents(choices: list[Choice]) -> list[Any]:
    return [(c.text, c.token_ids, c.logprobs, c.prompt_logprobs, c.finish_reason, c.stop_reason) for c in choices]


REQUESTS: dict[str, Callable[[], Generation]] = {
    "greedy": lambda: replace(generation(), cache_salt="a"),
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
    "a prediction": lambda: replace(generation(max_tokens=90), predicted_token_ids=[22, 23, 28, 53, *[9] * 9, 42, 29]),
}


@pytest.mark.parametrize("lost_after", [(0,), (2,), (1, 0, 2, 1)], ids=str)
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_resumes_where_its_router_was_lost(rig: Rig, name: str, lost_after: tuple[int, ...]) -> None:
    request = REQUESTS[name]()
    expected = await choices_of(Routers(rig=rig).open(request), request.num_choices)
    num_accepted = rig.engine.stats.num_accepted_tokens
    routers = Routers(*lost_after, rig=rig)
    assert contents(await choices_of(routers.open(request), request.num_choices)) == contents(expected)
    kept = (request.predicted_token_ids, request.cache_salt)
    assert all((again.predicted_token_ids, again.cache_salt) == kept for again in routers.submitted)
    assert bool(request.predicted_token_ids) == (rig.engine.stats.num_accepted_tokens > num_accepted)
    assert routers.reasons == {"router_lost": len(routers.calls) - 1}
    assert [call.cancels for call in routers.calls] == [True] * (len(routers.calls) - 1) + [False]
    await asyncio.sleep(0)
    assert rig.engine.scheduler.pool.num_free == rig.engine.scheduler.pool.num_blocks
    assert routers.outcomes == {"finished": 1}


@pytest.mark.parametrize(
    "error", [RequestError("bad"), QueueFullError("full"), TimeoutError("late"), ZeroDivisionError()], ids=repr
)
async def test_errors_that_no_other_router_would_help_against_are_passed_on(error: Exception) -> None:
    is_bug = isinstance(error, ZeroDivisionError)
    routers = Routers([error if is_bug else End.by(error, "request")])
    stream = routers.open(generation())
    with pytest.raises(type(error)):
        await stream.next()
    await stream.close()
    assert len(routers.submitted) == 1
    [outcome] = routers.outcomes
    assert outcome.startswith("failed ")


@pytest.mark.parametrize("name", ["greedy", "several prompts and choices", "a prompt's scores"])
async def test_a_request_that_is_moved_is_sent_at_once_and_then_rests(
    rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable_stream, "FIRST_PAUSE_S", 1000.0)
    request = REQUESTS[name]()
    expected = await choices_of(Routers(rig=rig).open(request), request.num_choices)
    routers = Routers(rig=rig)
    stream = routers.open(request)
    assert not stream.is_movable, "it has just come"
    now = asyncio.get_running_loop().time
    monkeypatch.setattr(resumable_stream, "_now", lambda: now() + 2.0)
    assert stream.is_movable
    stream.move()
    assert not stream.is_movable
    waiting = asyncio.create_task(choices_of(stream, request.num_choices))
    while len(routers.submitted) < 2:
        await asyncio.sleep(0)
    monkeypatch.setattr(resumable_stream, "_now", lambda: now() + 20.0)
    assert not stream.is_movable, "it was moved lately"
    assert contents(await waiting) == contents(expected)
    assert routers.reasons == {"moved": 1}
    assert routers.submitted[1].timeout_s <= request.timeout_s
    assert [sent.has_moved for sent in routers.submitted] == [False, True]


async def test_a_request_that_has_outputs_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_stream, "SHORTEST_WAIT_S", 0.0)
    stream = Routers([[output(1)]]).open(generation())
    assert stream.is_movable
    await asyncio.sleep(0)
    assert not stream.is_movable


@pytest.mark.parametrize(
    "comes_late", [Outputs("request", [LAST]), End.by(RequestError("bad"), "request")], ids=["outputs", "end"]
)
async def test_nothing_that_comes_while_a_request_is_moved_is_lost(comes_late: Any) -> None:
    routers = Routers([])
    stream = routers.open(generation())
    stream.move()
    stream.put(comes_late)
    if isinstance(comes_late, End):
        with pytest.raises(RequestError):
            await stream.next()
    else:
        assert [await stream.next(), await stream.next()] == [[LAST], []]
    assert len(routers.submitted) == 1


FULL = [QueueFullError("full"), BackPressureError(num_queued_requests=1, max_queued_requests=1)]


@pytest.mark.parametrize("errors", [*([error] for error in LOSSES), [LOSSES[0], *FULL]], ids=repr)
async def test_a_router_that_is_lost_or_full_after_the_admission_is_replaced(errors: list[Exception]) -> None:
    first, *others = errors
    routers = Routers([[output(1)], first], *([error] for error in others), [[LAST]])
    stream = routers.open(generation())
    assert [await stream.next(), await stream.next(), await stream.next()] == [[output(1)], [LAST], []]
    assert (sum(routers.reasons.values()), routers.reasons.get("queue_full", 0)) == (len(errors), len(others))


async def test_the_last_token_needs_no_end() -> None:
    routers = Routers([[LAST], ActorDiedError()])
    stream = routers.open(generation())
    assert [await stream.next(), await stream.next()] == [[LAST], []]
    await stream.close()
    await stream.close()
    assert [call.cancels for call in routers.calls] == [False]
    assert routers.outcomes == {"finished": 1}


async def test_a_request_whose_client_leaves_is_cancelled_and_counted_once() -> None:
    routers = Routers([[output(1)]])
    stream = routers.open(generation())
    await stream.next()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await stream.close()
    await stream.close()
    assert [call.cancels for call in routers.calls] == [True]
    assert routers.outcomes == {"aborted": 1}


class Refusing(Routers):
    """Routers that refuse; the first one that has not refused yet is asked."""

    def __init__(self, *names: str, error: Exception, free: str | None = None) -> None:
        super().__init__()
        self._names = names
        self._refusal = error
        self.asked: list[str] = []
        self.free = free

    def has_other(self, refusing: frozenset[str]) -> bool:
        return not {*self._names} <= refusing

    def submit(self, request: Generation, stream: ResumableStream) -> Call:
        names = [name for name in self._names if name not in request.refused_by] or [*self._names]
        self.asked.append(names[0])
        is_free = names[0] == self.free
        event = [LAST] if is_free else End.by(self._refusal, request.request_id, names[0])
        return Call(stream, [event], request.request_id)


@pytest.mark.parametrize("error", [QueueFullError("full"), TargetError("another target")])
@pytest.mark.parametrize("free", "abc")
async def test_a_request_that_one_router_refuses_goes_to_another_at_once(
    error: Exception, free: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable_stream, "FIRST_PAUSE_S", 1000.0)
    routers = Refusing("a", "b", "c", error=error, free=free)
    assert await routers.open(generation()).next() == [LAST]
    assert routers.asked == [*"abc"[: "abc".index(free) + 1]]
    assert routers.reasons == ({"refused": len(routers.asked) - 1} if free != "a" else {})


@pytest.mark.parametrize("num_routers", [1, 2, 3, 9])
async def test_a_client_hears_that_all_are_full_after_a_few_were_asked(num_routers: int) -> None:
    routers = Refusing(*map(str, range(num_routers)), error=QueueFullError("full"))
    with pytest.raises(QueueFullError):
        await routers.open(generation()).next()
    assert len(routers.asked) == min(num_routers, resumable_stream.MAX_REFUSALS)


async def test_each_router_is_asked_once_until_all_have_refused() -> None:
    """A request of another target waits for a Router of that, and one that was admitted for a place."""
    routers = Refusing("a", "b", error=TargetError("another target"))
    waiting = asyncio.create_task(routers.open(generation()).next())
    while len(routers.asked) < 6:
        await asyncio.sleep(0)
    assert routers.asked[:6] == ["a", "b"] * 3
    assert routers.reasons["refused"] - routers.reasons["target_lost"] in (0, 1)
    routers.free = "b"
    assert await waiting == [LAST]


async def test_the_deadline_is_that_of_the_first_submission() -> None:
    routers = Routers([[output(1)], ActorDiedError()], [[LAST]])
    stream = routers.open(generation(timeout_s=50.0))
    await stream.next()
    await asyncio.sleep(0.05)
    await stream.next()
    assert routers.submitted[0].timeout_s == pytest.approx(50.0, abs=0.01)
    assert routers.submitted[1].timeout_s <= 49.95


@pytest.mark.parametrize("script", [[], [LOSSES[3]]], ids=["silent", "no Router"])
async def test_a_request_that_no_router_takes_ends_at_its_deadline_and_is_logged_once(
    script: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resumable_stream, "GRACE_S", 0.01)
    with pytest.raises(TimeoutError, match=r"longer than 0\.02 s"):
        await Routers(script).open(generation(timeout_s=0.02)).next()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == len(script)


async def test_waiting_can_be_cancelled_and_loses_nothing() -> None:
    """As a stream does that sends a comment meanwhile."""
    routers = Routers([ActorDiedError()], [])
    stream = routers.open(generation())
    waiting = asyncio.create_task(stream.next())
    while not routers.submitted[1:]:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    stream.put(Outputs("request", [LAST]))
    assert await stream.next() == [LAST]
    assert len(routers.submitted) == 2


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    retries = Retries(lambda _: False)
    pauses = [retries.after(TargetError("lost"), None, 0.0)[1] for _ in range(8)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0]
    assert resumable_stream.LONGEST_PAUSE_S < LAST_WORDS_S, "or a shutdown ends requests that pause without an error"
    retries.note_progress()
    assert retries.after(TargetError("lost"), None, 0.0) == ("target_lost", 0.2)


def test_only_losses_that_lasted_count_against_a_request() -> None:
    retries, lasting_s = Retries(lambda _: False), resumable_stream.SHORTEST_LOSS_S
    for lasted_s in [0.0] * 20 + [lasting_s] * resumable_stream.MAX_LOSSES:
        retries.after(TargetError("lost"), None, lasted_s)
    with pytest.raises(TargetError):
        retries.after(TargetError("lost"), None, lasting_s)
