"""FakeLink, which connects to a responder in this process and fails on demand; and models that compute by rule."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.protocol.messages import AnyReply, AnyRequest, Ping, decode_request, encode
from cluster.transport import OnBreak
from cluster.transport.message_link import MessageLink
from engine.protocols import Draft, ProposeRow, Request, Verdict, VerifyRow, chain
from engine.sampling.params import SamplingParams

Answer = Callable[[AnyRequest], AnyReply | None]


class FakeLink(MessageLink):
    """A link without sockets. Messages are really encoded, and replies really matched to calls.

    `faults` holds what happens to the next requests, one entry each: "lose" (the request never arrives), "lose reply",
    "repeat" (the reply comes twice), "late" (the reply comes with that of the next request other than a ping), or None.
    """

    def __init__(self, answer: Answer, *, version: int = 1, on_break: OnBreak | None = None) -> None:
        super().__init__(version, on_break)
        self.answer = answer
        self.faults: list[str | None] = []
        self.requests: list[AnyRequest] = []
        self._late: list[bytes] = []

    def break_connection(self, reason: str) -> None:
        """Do as a link does whose connection breaks."""
        self._report_break(reason)

    def _send_now(self, payload: bytes) -> bool:
        return False

    async def _send(self, payload: bytes) -> None:
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
            self._late.append(payload)
            return
        if not isinstance(request, Ping):
            while self._late:
                self.deliver(self._late.pop(0))
        for _ in range(2 if fault == "repeat" else 1):
            self.deliver(payload)


class EchoDrafter:
    """Drafts the last committed tokens again, so that a draft tells what the worker believes was committed."""

    def __init__(self) -> None:
        self.seen: list[list[ProposeRow]] = []
        self.released: list[str] = []

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        self.seen.append([replace(row, request=row.request.copy()) for row in rows])
        return [chain(row.request.token_ids[-row.num_draft_tokens :]) for row in rows]

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


def propose_row(request_id: str, token_ids: Sequence[int], *, k: int = 3) -> ProposeRow:
    return ProposeRow(Request(request_id, list(token_ids), 2, SamplingParams(seed=5)), k)


def verify_row(
    request_id: str, token_ids: Sequence[int], *, block_ids: Sequence[int] = (1,), draft: Sequence[int] = ()
) -> VerifyRow:
    request = Request(request_id, list(token_ids), 2, SamplingParams(seed=5))
    return VerifyRow(request, len(token_ids) - 1, 1, list(block_ids), chain(list(draft)))
