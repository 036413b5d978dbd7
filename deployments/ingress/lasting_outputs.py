"""LastingOutputs: the outputs of one request, which outlast its Router: another one goes on where it stopped.

A request whose Router is lost is sent to a Router again, with the tokens that came from it; the tokens after them are
those that the lost one would have sent. So is a request that was withdrawn from the queue of a Router that has much to
do, and one that a Router refuses while another may take it.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import grpc  # type: ignore[import-untyped]
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.ingress.answer import Outputs
from deployments.ingress.draining import ShutdownError
from deployments.router.generation import Generation, WithdrawnError, choice_index
from engine.errors import CapacityError, TargetError
from engine.sequence import RequestOutput

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
SHORTEST_LOSS_S = 1.0
"""A submission that fails sooner was not begun: Serve chose a replica that is dead already, or refuses requests."""
MAX_LOSSES = 4
"""How many Routers a request may lose without a token from them: it may be what ends them."""
REST_S = 30.0
"""How long a request that was withdrawn stays at its next Router, however much that has to do."""
MAX_REFUSALS = 3
"""How many Routers in a row are asked to take a request."""
GRACE_S = 2.0
"""How long after the deadline a Router's last outputs, and its own error about the deadline, are waited for."""


class Submission(Outputs, Protocol):
    """The outputs of one Router.

    Attributes:
        refused_by: the Router, if it has refused the request and another one may take it.
    """

    refused_by: str | None


class LastingOutputs:
    """The outputs of one request, from one Router after another, until its deadline."""

    def __init__(
        self,
        request: Generation,
        submit: Callable[[Generation], Submission],
        count: Callable[[str], None],
        has_other: Callable[[frozenset[str]], bool],
    ) -> None:
        """Submit the request.

        Args:
            submit: sends a request to a Router.
            count: counts a resubmission, by its reason.
            has_other: whether there is any Router beside these.
        """
        self._request = request
        self._submit = submit
        self._count = count
        self._has_other = has_other
        self._deadline = _now() + request.timeout_s
        self._received: dict[int, list[int]] = {}
        self._finished: set[int] = set()
        self._num_resubmissions = 0
        self._num_failures = 0
        self._num_losses = 0
        self._rest_s = self._pause_s = 0.0
        self._refused_by: frozenset[str] = frozenset()
        self._submitted = _now()
        self._is_answered = self._was_admitted = False
        self._outputs: Submission | None = submit(request)

    async def next(self) -> list[RequestOutput]:
        """Return the next outputs; an empty list after the last ones. It may be cancelled and called again.

        Raises:
            Exception: what the Router raised, if another Router would raise it, too.
            TimeoutError: the request's deadline has passed.
        """
        while len(self._finished) < self._request.num_choices or self._outputs is not None:
            try:
                if self._outputs is not None and self._is_answered:
                    outputs = await self._outputs.next()  # the Router ends it at the deadline
                else:
                    async with asyncio.timeout_at(self._deadline + GRACE_S):
                        outputs = await self._first()
                if not outputs and len(self._finished) < self._request.num_choices:
                    raise TargetError("its Router ended the call before the request")
            except TimeoutError as error:
                raise TimeoutError(f"the request took longer than {self._request.timeout_s:g} s") from error
            except Exception as error:  # noqa: BLE001 - passed on, unless the Router was lost
                await self._lose(error)
            else:
                self._note(outputs)
                return outputs
        return []

    async def close(self) -> None:
        """End the request, finished or not."""
        outputs, self._outputs = self._outputs, None
        if outputs is not None:
            await outputs.close()

    async def _first(self) -> list[RequestOutput]:
        """Submit the request again if its Router was lost, and wait for the first outputs of the new one."""
        if self._outputs is None:
            await self._resubmit()
        assert self._outputs is not None
        outputs = await self._outputs.next()
        self._is_answered = True
        return outputs

    def _note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            choice = choice_index(output.request_id)
            self._received.setdefault(choice, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self._finished.add(choice)
            self._num_failures = self._num_losses = 0
            self._refused_by = frozenset()

    async def _lose(self, error: Exception) -> None:
        """Give the Router up.

        Raises:
            Exception: `error`, if sending the request again would not help.
        """
        self._pause_s = 0.0
        if self._outputs is not None and self._may_ask_another(self._outputs.refused_by):
            self._count("refused")
            await self.close()
            return
        self._rest_s = REST_S if isinstance(error, WithdrawnError) else 0.0
        reason = _reason(error, was_admitted=self._was_admitted)
        if reason is None:
            raise error
        self._was_admitted = True
        if isinstance(error, WithdrawnError):
            self._count(reason)
            await self.close()
            return
        self._num_failures += 1
        if _now() - self._submitted >= SHORTEST_LOSS_S:
            self._num_losses += 1
        if self._num_losses > MAX_LOSSES:
            raise error
        self._pause_s = min(FIRST_PAUSE_S * 2 ** (self._num_failures - 1), LONGEST_PAUSE_S)
        self._count(reason)
        logger.log(
            logging.WARNING
            if self._num_failures == 1
            else logging.DEBUG,  # the tries until a Router is back say no more
            "request %s goes on at another Router after %d tokens; its Router was lost (%s): %s",
            self._request.request_id,
            sum(map(len, self._received.values())),
            reason,
            str(error).partition("\n")[0],
        )
        await self.close()

    def _may_ask_another(self, refused_by: str | None) -> bool:
        """Note a Router that has refused the request; return whether to ask another one."""
        if refused_by is None:
            return False
        refusing = self._refused_by | {refused_by}
        may_ask = len(refusing) < MAX_REFUSALS and self._has_other(refusing)
        self._refused_by = refusing if may_ask else frozenset()
        return may_ask

    async def _resubmit(self) -> None:
        """Send the request to a Router again, with what has been received of it."""
        if self._pause_s:
            await asyncio.sleep(self._pause_s)
        self._num_resubmissions += 1
        self._submitted = _now()
        self._is_answered = False
        self._outputs = self._submit(
            replace(
                self._request,
                # Another id, so that outputs of the lost Router that are still on their way are not taken for new ones.
                request_id=f"{self._request.request_id}~{self._num_resubmissions}",
                timeout_s=max(self._deadline - self._submitted, 0.0),
                output_token_ids={choice: list(token_ids) for choice, token_ids in self._received.items()},
                finished=frozenset(self._finished),
                rest_s=self._rest_s,
                refused_by=self._refused_by,
            )
        )


def _reason(error: Exception, *, was_admitted: bool) -> str | None:
    """Return why a Router could not go on with a request; None if the request itself is why.

    Args:
        was_admitted: a Router has had the request, so that it may wait for a place at another one.
    """
    match error:
        case WithdrawnError():
            return "moved"
        case ShutdownError():
            return None
        case RayActorError() | grpc.aio.AioRpcError():
            return "router_lost"
        case DeploymentUnavailableError():
            return "no_router"
        case TargetError():
            return "target_lost"
        case CapacityError() | BackPressureError() if was_admitted:
            return "queue_full"
    return None


def _now() -> float:
    return asyncio.get_running_loop().time()
