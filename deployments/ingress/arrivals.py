"""Arrivals: the outputs that Routers send to this Ingress, by request; a request's end comes by Serve's handle.

Serve keeps knowing of every request: its call lasts until the request has ended, so that replicas are drained and
scaled as usual, and errors come as the Router raised them. Only the outputs take the shorter way.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from deployments.ingress.router_loads import RouterLoads
from deployments.router.delivery import decode
from deployments.router.generation import Failure, WithdrawnError, request_id_of
from deployments.router.load import Load
from engine.errors import TargetError
from engine.sequence import RequestOutput

LAST_OUTPUTS_TIMEOUT_S = 5.0
"""How long after a request's end its last outputs may come; they were sent before."""


class Arrivals:
    """The outputs of the requests of this Ingress, which come from all Routers."""

    def __init__(self, loads: RouterLoads) -> None:
        self._loads = loads
        self._requests: dict[str, ServeOutputs] = {}
        self._end: Exception | None = None

    def add(self, request_id: str, outputs: "ServeOutputs") -> None:
        """Expect the outputs of a request."""
        self._requests[request_id] = outputs
        if self._end is not None:
            outputs.fail(self._end)

    def remove(self, request_id: str) -> None:
        """Drop what still comes for a request."""
        self._requests.pop(request_id, None)

    def end(self, error: Exception) -> None:
        """End all requests with an error, and those that are added from now on."""
        self._end = error
        for outputs in self._requests.values():
            outputs.fail(error)

    def withdraw(self, request_ids: Iterable[str]) -> int:
        """End requests of which nothing has come yet, so that another Router takes them; return how many those were."""
        waiting = [self._requests[key] for key in request_ids if key in self._requests]
        waiting = [request for request in waiting if request.is_waiting]
        for request in waiting:
            request.fail(WithdrawnError("its Router has been stopped, and another one takes requests"))
        return len(waiting)

    def has_waiting(self, for_s: float) -> bool:
        """Whether a request has waited for its first output for so long."""
        before = asyncio.get_running_loop().time() - for_s
        return any(request.is_waiting and request.submitted <= before for request in self._requests.values())

    def deliver(self, payload: bytes) -> None:
        """Give an output to its request, if that is still open; note a Router's load.

        Raises:
            MalformedMessageError: the message holds neither.
        """
        content = decode(payload)
        if isinstance(content, Load):
            self._loads.report(content)
            return
        request = self._requests.get(request_id_of(content.request_id))
        if request is not None:
            request.put(content)


class ServeOutputs:
    """The outputs of one request: they come to the inbox, their number and the error after them by Serve's handle.

    Attributes:
        refused_by: the Router that has refused the request, if another one may take it.
    """

    def __init__(self, response: Any, request_id: str, arrivals: Arrivals) -> None:
        self._response = response
        self._request_id = request_id
        self._arrivals = arrivals
        self._outputs: list[RequestOutput] = []
        self._num_received = 0
        self._num_sent: int | None = None
        self._error: BaseException | None = None
        self._has_ended = False
        self.refused_by: str | None = None
        self._change = asyncio.Event()
        self.submitted = asyncio.get_running_loop().time()
        self._ending = asyncio.create_task(self._wait_for_end(), name="waiting for a request's end")
        arrivals.add(request_id, self)

    @property
    def is_waiting(self) -> bool:
        """Whether no output has come yet."""
        return not self._num_received and not self._has_ended

    def put(self, output: RequestOutput) -> None:
        """Take an output that has come."""
        self._outputs.append(output)
        self._num_received += 1
        self._change.set()

    def fail(self, error: Exception) -> None:
        """End with an error, which comes after the outputs that have come."""
        self._ending.cancel()
        self._error, self._num_sent, self._has_ended = error, None, True
        self._change.set()

    async def next(self) -> list[RequestOutput]:
        """Return the next outputs; an empty list after the last ones.

        Raises:
            Exception: why the Router gave the request up, or what it raised.
            TargetError: outputs that were sent did not come.
        """
        while not self._outputs and not (self._has_ended and self._num_received >= (self._num_sent or 0)):
            self._change.clear()
            if not self._has_ended:
                await self._change.wait()
                continue
            try:
                async with asyncio.timeout(LAST_OUTPUTS_TIMEOUT_S):
                    await self._change.wait()
            except TimeoutError:
                raise TargetError("the connection to the Router was lost") from None
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            return outputs
        if self._error is not None:
            raise self._error
        return []

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call something when the Router has no more to do with the request, closed or not."""
        self._ending.add_done_callback(lambda _: callback())

    async def close(self) -> None:
        """Cancel the call, finished or not; Serve then closes the Router's generator."""
        self._arrivals.remove(self._request_id)
        self._ending.cancel()
        self._response.cancel()

    async def _wait_for_end(self) -> None:
        try:
            async for item in self._response:
                if isinstance(item, Failure):
                    self._error, self.refused_by = item.error, item.refused_by
                else:
                    self._num_sent = item
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - every error is passed on to the caller
            self._error = raised_error(error)
        self._has_ended = True
        self._change.set()


def raised_error(error: BaseException) -> BaseException:
    """Return why a call to a replica failed.

    Ray wraps what the replica raised in a subclass whose text is a traceback. Serve raises CancelledError in the caller
    if the replica ends during the call.

    Raises:
        CancelledError: the caller itself is cancelled.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise error
        return TargetError("the replica is shutting down")
    cause: BaseException | None = getattr(error, "cause", None)
    return cause or error
