"""FakeLink, which connects to a responder in this process and fails on demand; and models that compute by rule."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from cluster.group import SpeculationGroup
from cluster.protocol.messages import (
    AnyReply,
    AnyRequest,
    Drafts,
    Failure,
    Ping,
    Pong,
    PrefixMissing,
    Propose,
    decode_request,
    encode,
)
from cluster.protocol.prefix_delta import PrefixTable
from cluster.transport import Endpoint, Link, OnBreak
from cluster.transport.credentials import Credentials
from cluster.transport.frames import FrameConnection
from cluster.workers.draft_queue import DraftQueue
from engine.params import SamplingParams
from engine.protocols import Draft, ProposeRow, Request, Verdict, VerifyRow, chain, run_in_process
from engine.stats.preparation import PREPARATION

Answer = Callable[[AnyRequest], AnyReply | None]


class FakeLink(Link):
    """A link without sockets. Messages are really encoded, and replies really matched to calls.

    `faults` holds what happens to the next requests, one entry each: "lose" (the request never arrives), "lose reply",
    "repeat" (the reply comes twice), "late" (the reply comes with that of the next request other than a ping), or None.
    """

    def __init__(self, answer: Answer, *, version: int = 1, on_break: OnBreak | None = None) -> None:
        endpoint, nobody = Endpoint("", "", "", 0, ""), Credentials("", "")
        super().__init__(endpoint, nobody, is_same_node=True, version=version, on_break=on_break)
        self.answer = answer
        self.faults: list[str | None] = []
        self.requests: list[AnyRequest] = []
        self._late_replies: list[bytes] = []
        self._connection = FakeConnection(self._take)

    def break_connection(self, reason: str) -> None:
        """Do as a link does whose connection breaks."""
        assert self._connection is not None
        self._lose(self._connection, reason)

    async def _open(self, path: str) -> FrameConnection:
        return FakeConnection(self._take)

    def _take(self, payload: bytes) -> None:
        request = decode_request(payload)
        self.requests.append(request)
        fault = self.faults.pop(0) if self.faults else None
        if fault == "lose":
            return
        reply = self.answer(request)
        if reply is None:
            return
        asyncio.get_running_loop().call_soon(self._arrive, fault, request, encode(reply))

    def _arrive(self, fault: str | None, request: AnyRequest, payload: bytes) -> None:
        if fault == "lose reply":
            return
        if fault == "late":
            self._late_replies.append(payload)
            return
        if not isinstance(request, Ping):
            while self._late_replies:
                self._deliver(self._late_replies.pop(0))
        for _ in range(2 if fault == "repeat" else 1):
            self._deliver(payload)


class FakeConnection(FrameConnection):
    """A connection that hands over what is sent."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        super().__init__(take, lambda _: None)
        self._has_room.set()

    def send(self, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            self._on_message(payload)

    def abort(self) -> None:
        self.connection_lost(None)


class EchoDrafter:
    """Drafts the last committed tokens again, so that a draft tells what the worker believes was committed."""

    def __init__(self) -> None:
        self.seen: list[list[ProposeRow]] = []
        self.released: list[str] = []

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        self.seen.append([replace(row, request=row.request.copy()) for row in rows])
        return [chain(row.request.token_ids[-row.num_draft_tokens :] if row.num_draft_tokens else []) for row in rows]

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


class SumVerifier:
    """Commits the sum of all tokens, modulo the vocabulary: every committed token has a say in it."""

    def __init__(self, vocab_size: int = 1000) -> None:
        self.vocab_size = vocab_size
        self.seen: list[list[VerifyRow]] = []
        self.released: list[str] = []
        self.decided: list[bool] = []

    async def verify(self, rows: Sequence[VerifyRow], *, decides: bool = True) -> list[Verdict]:
        self.decided.append(decides)
        self.seen.append([replace(row, request=row.request.copy(), block_ids=list(row.block_ids)) for row in rows])
        if not decides:
            return []
        return [
            Verdict([sum(row.request.token_ids) % self.vocab_size]) if row.reaches_tip else Verdict() for row in rows
        ]

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def echo_worker(echo: EchoDrafter, *, capacity: int = 8, version: int = 1) -> Answer:
    """What a draft worker answers under one lease, whose drafter is an echo."""
    table = PrefixTable(capacity, echo.release)

    def answer(request: AnyRequest) -> AnyReply:
        number = request.round
        if isinstance(request, Ping):
            return Pong(number, version, 0.0)
        assert isinstance(request, Propose)
        if missing := table.update(request.released, [entry.prefix for entry in request.rows]):
            return PrefixMissing(number, version, 0.0, missing)
        rows = [ProposeRow(table[entry.prefix.request_id].request, entry.num_draft_tokens) for entry in request.rows]
        try:
            drafts = run_in_process(echo.propose(rows))
        except TypeError as error:
            return Failure(number, version, 0.0, str(error))
        return Drafts(number, version, 1e-6, drafts, None, PREPARATION.counts)

    return answer


def queue_worker(queue: DraftQueue, *, version: int = 1) -> Answer:
    """What a draft worker answers under one lease; then it works ahead as far as it can."""

    def answer(request: AnyRequest) -> AnyReply | None:
        replies: list[AnyReply] = []
        queue.submit(version, request, replies.append)
        while queue.step():
            pass
        return replies[0] if replies else None

    return answer


def propose_row(request_id: str, token_ids: Sequence[int], *, k: int = 3) -> ProposeRow:
    return ProposeRow(Request(request_id, list(token_ids), 2, SamplingParams(seed=5)), k)


def verify_row(
    request_id: str, token_ids: Sequence[int], *, block_ids: Sequence[int] = (1,), draft: Sequence[int] = ()
) -> VerifyRow:
    request = Request(request_id, list(token_ids), 2, SamplingParams(seed=5))
    return VerifyRow(request, len(token_ids) - 1, 1, list(block_ids), chain(list(draft)))


def process_ids(group: SpeculationGroup) -> dict[str, int]:
    """The process ids of the running workers, by name: `draft`, `target-0`, `target-1`, ..."""
    own = group._own_draft
    drafts = {} if own is None or own.workers is None else {"draft": own.workers.processes[0].pid}
    ranks = [] if group._target is None else group._target.processes
    return drafts | {f"target-{rank}": process.pid for rank, process in enumerate(ranks)}


def answering(make, on_break=None):
    """Return a link whose peer answers pings, and everything else with what `make` returns."""

    def answer(request: AnyRequest):
        if isinstance(request, Ping):
            return Pong(request.round, request.version, 0.0)
        return make(request)

    return FakeLink(answer, on_break=on_break)
