"""Links and workers in virtual time: what `cluster.transport` is between real processes.

Messages are encoded and decoded as they are there, so nothing is shared between the two ends.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from cluster.protocol.messages import (
    AnyReply,
    AnyRequest,
    Propose,
    RoundMessage,
    Verify,
    decode_reply,
    decode_request,
    encode,
)
from cluster.transport import DeadlineError, PeerGoneError
from tests.bench.paced.virtual.clock import Process

Answer = Callable[[AnyRequest, Callable[[AnyReply], None]], None]
"""Takes a request, and what sends its reply, now or later."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a round takes besides its passes.

    Attributes:
        wire_s: a message from a process to another, the waking of the other included.
        router_s, router_row_s: of the Router, for each message that it sends or gets, and for each row in it.
        worker_s, worker_row_s: of a worker, for each message and each row in it, before its pass.
    """

    wire_s: float = 0.25e-3
    router_s: float = 0.1e-3
    router_row_s: float = 10e-6
    worker_s: float = 0.25e-3
    worker_row_s: float = 25e-6


class VirtualWorker:
    """A worker: answers requests one at a time, and works ahead while none has arrived; see `Server.serve`."""

    def __init__(self, process: Process, costs: Costs) -> None:
        self._process = process
        self._costs = costs
        self._requests: asyncio.Queue[tuple[bytes, Callable[[bytes], None]]] = asyncio.Queue()

    def deliver(self, payload: bytes, reply: Callable[[bytes], None]) -> None:
        self._requests.put_nowait((payload, reply))

    async def serve(self, answer: Answer, work: Callable[[], bool]) -> None:
        is_working = False
        while True:
            if is_working and self._requests.empty():
                is_working = await self._process.compute(work)
                continue
            payload, deliver = await self._requests.get()
            request = decode_request(payload)
            host_s = self._costs.worker_s + _num_rows(request) * self._costs.worker_row_s
            await self._process.compute(answer, request, self._sender(deliver), after_s=host_s)
            is_working = True

    def _sender(self, deliver: Callable[[bytes], None]) -> Callable[[AnyReply], None]:
        loop = asyncio.get_running_loop()

        def send(reply: AnyReply) -> None:
            loop.call_at(self._process.clock() + self._costs.wire_s, deliver, encode(reply))

        return send


class VirtualLink:
    """A link of a Router to a worker; late replies are dropped, and nothing is ever lost."""

    def __init__(self, router: Process, worker: VirtualWorker, costs: Costs, version: int = 1) -> None:
        self.version = version
        self._router = router
        self._worker = worker
        self._costs = costs
        self._is_closed = False

    async def call(self, request: RoundMessage) -> AnyReply:
        """Send a request and return its reply; raises what `Link.call` raises."""
        return await (await self.begin(request))

    async def begin(self, request: RoundMessage) -> asyncio.Future[AnyReply]:
        """Send a request, and return the future of its reply."""
        if self._is_closed:
            raise PeerGoneError("the link was closed")
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[AnyReply] = loop.create_future()
        host_s = self._costs.router_s + _num_rows(request) * self._costs.router_row_s

        async def read(payload: bytes) -> None:
            await self._router.spend(host_s)
            if not reply.done():
                reply.set_result(decode_reply(payload))

        def receive(payload: bytes) -> None:
            self._reading = asyncio.create_task(read(payload))

        payload = encode(request)
        await self._router.spend(host_s)
        loop.call_later(self._costs.wire_s, self._worker.deliver, payload, receive)
        late = DeadlineError(f"no reply to round {request.round} within {request.deadline_s:g} s")
        timer = loop.call_later(request.deadline_s, lambda: None if reply.done() else reply.set_exception(late))
        reply.add_done_callback(lambda _: timer.cancel())
        return reply

    def close(self, reason: str = "") -> None:
        self._is_closed = True


def _num_rows(message: RoundMessage) -> int:
    return len(message.rows) if isinstance(message, Propose | Verify) else 0
