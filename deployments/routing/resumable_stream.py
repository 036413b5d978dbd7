"""ResumableStream: a request's outputs. If its Router is lost, another Router resumes it after the tokens received."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import grpc  # type: ignore[import-untyped]
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.errors import ShutdownError, kind_of
from deployments.observe.metrics import IngressMetrics
from deployments.observe.tracing import note_resubmission
from deployments.wire import End, Generation, Outputs, choice_index
from engine.errors import CapacityError, PacelineError, TargetError
from engine.requests.output import RequestOutput

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

SHORTEST_WAIT_S = 1.0  # before a request may move: moving costs more than most waits
REST_S = 30.0  # at the Router that the request was moved to
GRACE_S = 2.0
"""How long after the deadline to wait for a Router's last outputs, and its own error about the deadline."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 2.0  # shorter than `draining.LAST_WORDS_S`: a request learns of a shutdown only after its pause
SHORTEST_LOSS_S = 1.0
"""A submission that fails sooner was never begun: Serve chose a dead replica, or refuses requests."""
MAX_LOSSES = 4
"""Routers that a request may lose without a token from them: the request may be the cause."""
MAX_REFUSALS = 3  # by Routers in a row


class MovedError(PacelineError):
    """The Ingress moves a waiting request to a Router with less to do."""


class Call(Protocol):
    """The call to the Router that has a request."""

    def close(self, *, cancels: bool) -> None:
        """Ignore its failures; `cancels` also aborts the request there."""
        ...


class ResumableStream:
    """The outputs of one request, from one Router after another, until its deadline."""

    def __init__(
        self,
        request: Generation,
        submit: Callable[[Generation, "ResumableStream"], Call],
        has_other: Callable[[frozenset[str]], bool],
        metrics: IngressMetrics,
    ) -> None:
        """Submit the request; `has_other` tells whether there is a Router outside a set."""
        self._request = request
        self._submit_to_router = submit
        self._metrics = metrics
        self._retries = Retries(has_other)
        self._deadline = _now() + request.timeout_s
        self._received: dict[int, list[int]] = {}
        self._finished: set[int] = set()
        self._num_submissions = 0
        self._pause_s = 0.0
        self._stays_s = SHORTEST_WAIT_S
        self._outcome: tuple[str, str] | None = ("aborted", "")
        self._has_news = asyncio.Event()
        self._call: Call | None
        self._outputs: list[RequestOutput]
        self._error: BaseException | None
        self._refused_by: str | None
        self._submit()
        metrics.num_started += 1

    def put(self, message: Outputs | End) -> None:
        """Take outputs of the Router, or the error that ended the request there after its outputs."""
        if isinstance(message, Outputs):
            self._outputs += message.outputs
            self._is_answered = True
        else:
            self._error, self._refused_by = message.exception(), message.refused_by
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        """End the Router's outputs with an error, after the outputs received so far."""
        if self._error is None:
            self._error = error
            self._has_news.set()

    def move(self) -> None:
        """Withdraw the request from a Router that has sent nothing."""
        self.fail(MovedError("another Router has less to do"))

    @property
    def is_movable(self) -> bool:
        """Whether the Router has sent nothing and the request has waited there long enough."""
        return not self._is_answered and self._error is None and _now() >= self._submitted + self._stays_s

    async def next(self) -> list[RequestOutput]:
        """Return the next outputs; an empty list after the last outputs. It may be cancelled and called again.

        Raises the Router's error if another Router would raise it, too; TimeoutError after the request's deadline.
        """
        try:
            outputs = await self._next()
        except Exception as error:
            kind = kind_of(error)
            self._outcome = "failed", kind.code or kind.type
            raise
        if not outputs:
            self._outcome = "finished", ""
        return outputs

    async def close(self) -> None:
        """End the request, finished or not; the first time, count its end."""
        self._close_call()
        if self._outcome is not None:
            self._metrics.ended[self._outcome] += 1
            self._outcome = None

    @property
    def _is_finished(self) -> bool:
        return len(self._finished) == self._request.num_choices

    async def _next(self) -> list[RequestOutput]:
        while not self._is_finished:
            # A Router that has begun to answer ends the request at the deadline: no timer is needed for each wait.
            has_begun = self._call is not None and self._is_answered
            try:
                async with asyncio.timeout_at(None if has_begun else self._deadline + GRACE_S):
                    outputs = await self._receive()
            except TimeoutError as error:
                raise TimeoutError(f"the request took longer than {self._request.timeout_s:g} s") from error
            except Exception as error:  # noqa: BLE001 - passed on, unless another Router may help
                self._retry(error)
            else:
                self._note(outputs)
                return outputs
        return []

    async def _receive(self) -> list[RequestOutput]:
        if self._call is None:
            await asyncio.sleep(self._pause_s)
            self._submit()
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._has_news.clear()
            await self._has_news.wait()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            choice = choice_index(output.request_id)
            self._received.setdefault(choice, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self._finished.add(choice)
        self._retries.note_progress()

    def _retry(self, error: Exception) -> None:
        """Close the call, so that the request is submitted again; raise `error` if that would not help."""
        reason, self._pause_s = self._retries.after(error, self._refused_by, _now() - self._submitted)
        self._metrics.resubmissions[reason] += 1
        note_resubmission(reason, sum(map(len, self._received.values())))
        self._stays_s = REST_S if isinstance(error, MovedError) else SHORTEST_WAIT_S
        if self._pause_s:
            logger.log(
                # Only the first failure is news until a Router is back.
                logging.WARNING if self._retries.num_failures == 1 else logging.DEBUG,
                "request %s resumes at another Router after %d tokens; its Router was lost (%s): %s",
                self._request.request_id,
                sum(map(len, self._received.values())),
                reason,
                str(error).partition("\n")[0],
            )
        self._close_call()

    def _close_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.close(cancels=not self._is_finished)

    def _submit(self) -> None:
        # A new id each time, so that late outputs of a lost Router are dropped.
        suffix = f"~{self._num_submissions}" if self._num_submissions else ""
        self._num_submissions += 1
        self._submitted = _now()
        self._call = None
        self._outputs = []
        self._error = self._refused_by = None
        self._is_answered = False
        request = replace(
            self._request,
            request_id=self._request.request_id + suffix,
            timeout_s=max(self._deadline - self._submitted, 0.0),
            output_token_ids={choice: list(token_ids) for choice, token_ids in self._received.items()},
            finished=frozenset(self._finished),
            refused_by=self._retries.refused_by,
            has_moved=self._stays_s == REST_S,
        )
        self._call = self._submit_to_router(request, self)


class Retries:
    """The failures of one request since its last token; Routers outside `refused_by` are tried first."""

    def __init__(self, has_other: Callable[[frozenset[str]], bool]) -> None:
        self._has_other = has_other
        self.num_failures = 0
        self._num_losses = 0
        self._was_admitted = False
        self.refused_by: frozenset[str] = frozenset()

    def note_progress(self) -> None:
        self.num_failures = self._num_losses = 0
        self.refused_by = frozenset()

    def after(self, error: Exception, refused_by: str | None, lasted_s: float) -> tuple[str, float]:
        """Return why a request is submitted again, as metrics count it, and the pause before that; or raise `error`.

        `refused_by` is the Router if another Router may accept the request; `lasted_s` is how long the Router had it.
        """
        if refused_by is not None:
            refusing = self.refused_by | {refused_by}
            if len(refusing) < MAX_REFUSALS and self._has_other(refusing):
                self.refused_by = refusing
                return "refused", 0.0
            self.refused_by = frozenset()
        reason = self._reason(error)
        if reason is None:
            raise error
        self._was_admitted = True
        if isinstance(error, MovedError):
            return reason, 0.0
        self.num_failures += 1
        self._num_losses += lasted_s >= SHORTEST_LOSS_S
        if self._num_losses > MAX_LOSSES:
            raise error
        return reason, min(FIRST_PAUSE_S * 2.0 ** min(self.num_failures - 1, 9), LONGEST_PAUSE_S)

    def _reason(self, error: Exception) -> str | None:
        """Return why the Router could not continue a request; None if the request itself is the cause."""
        match error:
            case MovedError():
                return "moved"
            case ShutdownError():
                return None
            case RayActorError() | grpc.aio.AioRpcError():
                return "router_lost"
            case DeploymentUnavailableError():
                return "no_router"
            case TargetError():
                return "target_lost"
            case CapacityError() | BackPressureError() if self._was_admitted:
                return "queue_full"  # it may wait for a place at another Router
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()
