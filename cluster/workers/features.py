"""Features on their way from rank 0 of the target to the draft worker, beside the Router's rounds.

The target's KV blocks hold the features of all tokens, cached prefixes included. After each verification, rank 0 sends
what the draft worker lacks. Rows may be lost: the draft worker names the requests with a gap, and gets all their rows.
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from cluster.protocol.messages import AnyReply, AnyRequest, Failure, FeatureRows, Features, PrefixMissing
from cluster.transport import Connector, Endpoint, Link, TransportError
from engine.protocols import Verdict, VerifyRow

if TYPE_CHECKING:
    from concurrent.futures import Future

    from engine.drafting.assembly import LoadedVerifier
    from engine.drafting.model.feature_store import FeatureStore

logger = logging.getLogger(__name__)

_MAX_BYTES = 16 * 2**20
"""The most bytes of features in a message, which are copied from the device between two rounds."""
_MAX_UNDER_WAY = 4
"""The most messages without a reply; beyond them, rows are sent later."""
_DEADLINE_S = 1.0


def receiver(features: "FeatureStore", owner: str) -> Callable[[AnyRequest], AnyReply]:
    """Return the draft worker's answer to rank 0: it keeps rows, and names the requests with a gap before them."""

    def answer(request: AnyRequest) -> AnyReply:
        if not isinstance(request, Features):
            return Failure(request.round, request.version, 0.0, f"this takes no {type(request).__name__}")
        for request_id in request.released:
            features.forget(owner + request_id)
        dtype, row_bytes = request.dtype, request.row_bytes
        missing = [
            entry.request_id
            for entry in request.rows
            if not features.put(
                owner + entry.request_id, entry.offset, entry.end, entry.rows, dtype=dtype, row_bytes=row_bytes
            )
        ]
        return PrefixMissing(request.round, request.version, 0.0, missing)

    return answer


class FeatureSource:
    """A verifier on rank 0 that sends the features of computed tokens, on an event loop in a thread of its own.

    The target never waits for the draft worker. `num_sent` counts the features sent of each request, until the draft
    worker reports a gap. Both threads change it: what a race spoils comes back as a gap.
    """

    def __init__(self, verifier: "LoadedVerifier", connector: Connector, version: int) -> None:
        self.identity = connector.identity
        self.num_sent: dict[str, int] = {}
        self._verifier, self._connector, self._version = verifier, connector, version
        self._computed: list[tuple[VerifyRow, int]] = []
        """The rows of the last verification, and how many tokens of each are committed and computed."""
        self._rounds = itertools.count(1)
        self._link: Link | None = None
        self._released: list[str] = []
        self._under_way: list[Future[None]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="features", daemon=True).start()

    def connect(self, endpoint: Endpoint) -> None:
        asyncio.run_coroutine_threadsafe(self._connect(endpoint), self._loop).result()

    async def verify(self, rows: Sequence[VerifyRow], *, decides: bool = True) -> list[Verdict]:
        verdicts = await self._verifier.verify(rows, decides=decides)
        ends = (row.start + row.length + verdict.num_accepted for row, verdict in zip(rows, verdicts, strict=True))
        self._computed = list(zip(rows, ends, strict=True))
        return verdicts

    def release(self, request_id: str) -> None:
        """Drop a request that has ended; the draft worker is told with the next message."""
        self._verifier.release(request_id)
        self.num_sent.pop(request_id, None)
        if self._link is not None:
            self._released.append(request_id)

    @property
    def has_room(self) -> bool:
        self._under_way = [call for call in self._under_way if not call.done()]
        return self._link is not None and len(self._under_way) < _MAX_UNDER_WAY

    def work(self) -> bool:
        """Send the features that the draft worker lacks; return False: no work is left."""
        computed, self._computed = self._computed, []
        if not computed or not self.has_room:
            return False
        kv, num_sent, slots, spans = self._verifier.kv, self.num_sent, list[int](), []
        assert kv.states is not None
        row_bytes = kv.states.shape[-1] * kv.states.itemsize
        # The shortest first, so that a context that takes many rounds holds up no other.
        starts = [num_sent.get(row.request.request_id, 0) for row, _ in computed]
        for start, (row, end) in sorted(zip(starts, computed, strict=True), key=lambda entry: entry[1][1] - entry[0]):
            request_id = row.request.request_id
            places = range(start, min(end, start + max(1, _MAX_BYTES // row_bytes) - len(slots)))
            spans.append((request_id, start, end, len(slots) * row_bytes, (len(slots) + len(places)) * row_bytes))
            slots += [kv.slot(row.block_ids, place) for place in places]
        with torch.inference_mode():
            rows = kv.states.flatten(0, 1)[torch.tensor(slots, dtype=torch.int64, device=kv.states.device)].cpu()
        num_sent |= {request_id: start + (b - a) // row_bytes for request_id, start, _, a, b in spans}
        data = rows.flatten().view(torch.uint8).numpy().data
        entries = [FeatureRows(request_id, start, end, data[a:b]) for request_id, start, end, a, b in spans]
        dtype, released, self._released = str(rows.dtype).removeprefix("torch."), self._released, []
        message = Features(next(self._rounds), self._version, _DEADLINE_S, released, dtype, row_bytes, entries)
        self._under_way.append(asyncio.run_coroutine_threadsafe(self._call(message), self._loop))
        return False

    async def _connect(self, endpoint: Endpoint) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._connector.connect(endpoint, version=self._version, on_break=self._forget_all)
        self.num_sent = {}

    def _forget_all(self, reason: str) -> None:
        logger.debug("The draft worker gets all features again: %s", reason)
        self.num_sent = {}

    async def _call(self, message: Features) -> None:
        link = self._link
        assert link is not None
        try:
            reply = await link.call(message)
            if not isinstance(reply, PrefixMissing):
                self._forget_all(f"it replied {reply}")
                return
            for request_id in reply.request_ids:
                self.num_sent.pop(request_id, None)
        except TransportError as error:
            if link is self._link:
                self._forget_all(str(error))
