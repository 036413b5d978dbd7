"""ServeRouters: an Ingress's only way to Routers: Serve's handle for calls, an inbox for their messages."""

import asyncio
import logging
import math
from dataclasses import replace
from itertools import chain
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.transport import InboxAddress, open_inbox
from deployments.observe.logs import in_background
from deployments.observe.metrics import IngressMetrics, ReplicaMetrics
from deployments.ray_internals import base_url, replica_calls
from deployments.routing.loads import LOADS, Heard
from deployments.routing.moving import plan_moves
from deployments.routing.prefixes import prefix_hashes
from deployments.routing.resumable_stream import ResumableStream
from deployments.wire import DRAFTS, Description, Generation, Report, decode
from engine.errors import TargetError

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

RETRY_PAUSE_S = 1.0
SUBSCRIBE_PERIOD_S = 0.5
MOVE_PERIOD_S = 1.0
END_TIMEOUT_S = 5.0  # for a request's last outputs, after its call has ended
CANCEL_PAUSE_S = 0.3
"""How long a cancelled call waits before it fails its request: if a client leaves, Serve cancels the request, too."""
ANSWER_TIMEOUT_S = 2.0


class ServeRouters:
    """The Routers, and the open requests of this Ingress."""

    def __init__(self, handle: Any, target: str | None, *, has_pool: bool = False) -> None:
        context = serve.get_replica_context()
        self._replica = context.replica_tag
        self._handle = handle
        names = [context.deployment, *([DRAFTS] if has_pool else [])]
        self._measured = [*(serve.get_deployment_handle(name, context.app_name) for name in names), handle]
        # Not by reference: an object in Ray's store for every request would take longer.
        self._generate = handle.generate.options(stream=True, _by_reference=False)
        self._target_id = target
        self._metrics = IngressMetrics()
        self._capacity: int | None = None
        self._inbox: asyncio.Server
        self._address: InboxAddress
        self._streams: dict[str, ResumableStream] = {}
        self._shutdown: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(cls, handle: Any, host: str, *, target: str | None = None, has_pool: bool = False) -> "ServeRouters":
        """Open an inbox on this node's address, and stay subscribed to all Routers.

        `target` is the `target_id` of the only target that may serve requests, which matters during updates; None is
        any.
        """
        routers = cls(handle, target, has_pool=has_pool)
        routers._inbox, routers._address = await open_inbox(host, routers._deliver)
        routers._tasks = [
            in_background(routers._keep_subscribed(), name="subscribe to Routers"),
            in_background(routers._keep_moving(), name="move waiting requests"),
        ]
        return routers

    def generate(self, request: Generation) -> ResumableStream:
        """Send a request to a Router; if that Router is lost, another Router resumes the request."""
        prefixes = prefix_hashes(request.prompts[0], request.cache_salt)
        request = replace(request, target_id=self._target_id, prefixes=prefixes)
        return ResumableStream(request, self._submit, self._has_other, self._metrics)

    def end_all(self, error: Exception) -> None:
        """End all requests with an error, and later requests, too."""
        self._shutdown = error
        for stream in self._streams.values():
            stream.fail(error)

    def _has_other(self, refusing: frozenset[str]) -> bool:
        return not LOADS.routers <= refusing

    def _submit(self, request: Generation, stream: ResumableStream) -> "RouterCall":
        LOADS.begin(request.request_id, request.num_unfinished)  # before Serve chooses a Router
        try:
            response = self._generate.remote(request, self._address)
        except Exception:
            LOADS.end(request.request_id)
            raise
        self._streams[request.request_id] = stream
        if self._shutdown is not None:
            stream.fail(self._shutdown)
        return RouterCall(response, request.request_id, self._streams)

    def _deliver(self, payload: bytes) -> None:
        message = decode(payload)
        if isinstance(message, Report):
            LOADS.note(message)
        elif (stream := self._streams.get(message.request_id)) is not None:
            stream.put(message)

    async def _keep_subscribed(self) -> None:
        while True:
            await asyncio.sleep(SUBSCRIBE_PERIOD_S)
            if LOADS.is_one_silent:
                await ask_all(self._handle, "subscribe", self._address)

    async def _keep_moving(self) -> None:
        while True:
            await asyncio.sleep(MOVE_PERIOD_S)
            self._move()

    def _move(self) -> None:
        if self._capacity is None:
            return
        moves = plan_moves(LOADS.queues(self._is_movable), self._capacity)
        for request_id in moves:
            self._streams[request_id].move()
        if moves:
            logger.info("%d waiting requests move to another Router", len(moves))

    def _is_movable(self, request_id: str) -> bool:
        stream = self._streams.get(request_id)
        return stream is not None and stream.is_movable

    def room(self, factor: int = 1) -> float:
        """Return how many requests may still be sent, if Routers held `factor` times as many; inf at first."""
        return math.inf if self._capacity is None else LOADS.room(factor * self._capacity)

    def retry_after_s(self) -> int:
        """Return the seconds after which refused clients should retry."""
        return LOADS.retry_after_s()

    def count_refusal(self, reason: str) -> None:
        self._metrics.ended["refused", reason] += 1

    def heard(self) -> list[Heard]:
        """Return the last report of each available Router of this Ingress's target."""
        return [heard for heard in LOADS.heard if self._target_id in (None, heard.report.target_id)]

    async def describe(self) -> Description:
        """Return the served models; wait for the first replica."""
        rejected: str | None = None
        while True:
            try:
                description: Description = await self._handle.describe.remote()
            except (RayActorError, DeploymentUnavailableError, asyncio.CancelledError) as error:
                logger.warning("no Router yet: %s", raised_error(error))
            else:
                if self._target_id in (None, description.target_id):
                    self._capacity = description.capacity
                    return description
                if rejected != description.target_id:
                    rejected = description.target_id
                    logger.info("waiting for a Router of %s; %s is still served", self._target_id, rejected)
            await asyncio.sleep(RETRY_PAUSE_S)

    async def kill(self, process: str) -> bool:
        """Kill the draft, the target or the Router of every replica; return whether any had such a process."""
        return True in await ask_all(self._handle, "kill", process)

    def collect_here(self) -> ReplicaMetrics:
        return ReplicaMetrics(self._replica, self._metrics.collect())

    async def collect(self) -> list[ReplicaMetrics]:
        """Return the metrics of every Ingress, Router and draft worker of a pool that answers."""
        answers = await asyncio.gather(*(ask_all(handle, "collect") for handle in self._measured))
        metrics = {answer.replica: answer for answer in chain(*answers) if isinstance(answer, ReplicaMetrics)}
        # Serve does not list this replica while it starts, and perhaps not while it ends.
        return list({self._replica: self.collect_here(), **metrics}.values())

    async def base_url(self) -> str:
        return await asyncio.to_thread(base_url)


class RouterCall:
    """A call that lasts as long as a Router works on a request; a failure of the call ends the request's stream."""

    def __init__(self, response: Any, request_id: str, streams: dict[str, ResumableStream]) -> None:
        self._response = response
        self._request_id = request_id
        self._streams = streams
        self._task = asyncio.create_task(self._wait(), name="waiting for a Router's call")
        # The Router works on the request until the call returns, even if it is closed.
        self._task.add_done_callback(lambda _: LOADS.end(request_id))

    def close(self, *, cancels: bool) -> None:
        """Ignore the call's failures; `cancels` also aborts the request in the Router, unless it has ended."""
        self._streams.pop(self._request_id, None)
        if cancels:
            self._task.cancel()
            self._response.cancel()

    async def _wait(self) -> None:
        try:
            async for _ in self._response:
                pass
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - every error is passed on
            self._fail(raised_error(error), CANCEL_PAUSE_S if isinstance(error, asyncio.CancelledError) else 0.0)
        else:
            self._fail(TargetError("the connection to the Router was lost"), END_TIMEOUT_S)

    def _fail(self, error: BaseException, pause_s: float = 0.0) -> None:
        """Fail the stream, unless the call is closed; first wait `pause_s` for the request's own end."""
        if pause_s:
            asyncio.get_running_loop().call_later(pause_s, self._fail, error)
        elif (stream := self._streams.get(self._request_id)) is not None:
            stream.fail(error)


async def ask_all(handle: Any, method: str, *args: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Any]:
    """Return each replica's answer or exception, TimeoutError if it is late; Serve's own broadcast hides exceptions."""
    response = handle.broadcast(method, *args)  # bypasses the replicas' queues
    try:
        async with asyncio.timeout(timeout_s):
            calls = await replica_calls(response)
    except DeploymentUnavailableError:
        return []
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - returned, or it would end a task that asks
        return [raised_error(error)]
    return await asyncio.gather(*(_answer(call, timeout_s) for call in calls))


async def _answer(call: Any, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await call.get_async()
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - returned to the caller
        return raised_error(error)


def raised_error(error: BaseException) -> BaseException:
    """Return why a call to a replica failed; raise CancelledError if the caller itself is cancelled.

    Ray wraps a replica's exception. Serve raises CancelledError in the caller if the replica ends during the call.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise error
        return TargetError("the replica is shutting down")
    cause: BaseException | None = getattr(error, "cause", None)
    return cause or error
