"""Prefix deltas: the Router sends each worker only the tokens that it lacks.

The Router owns the committed tokens, and a worker's table is a cache of them. A delta starts at the length of the
worker's last *reply*, so it is valid whether or not messages in between arrived. A worker that lacks a prefix replies
with its id, and the Router sends the whole prefix.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.protocol.messages import PrefixDelta
from engine.blocks.block_pool import BlockTable, block_table
from engine.protocols import ProposeRow, Request, VerifyRow


@dataclass(slots=True)
class Prefix:
    """A worker's copy of a request and its block table (empty in a draft worker)."""

    request: Request
    block_ids: BlockTable


class PrefixTable:
    """Worker side: at most `capacity` prefixes by request id; the least recently used are evicted first.

    Only `update` changes the `token_ids` of its requests. The same deltas in the same order give the same table, so a
    target's ranks agree without communicating. `forget` is called with `owner` + id of whatever is released or evicted,
    `ended` before that with a request that is released.
    """

    def __init__(
        self,
        capacity: int,
        forget: Callable[[str], None],
        *,
        owner: str = "",
        ended: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self._capacity, self._owner, self._ended = capacity, owner, ended
        self._forget: Callable[[str], None] = lambda request_id: forget(owner + request_id)
        self._prefixes: OrderedDict[str, Prefix] = OrderedDict()

    def __getitem__(self, request_id: str) -> Prefix:
        return self._prefixes[request_id]

    def update(self, released: Iterable[str], deltas: Sequence[PrefixDelta]) -> list[str]:
        """Release requests that have ended, and apply the deltas.

        Returns the ids of deltas that continue no held prefix; if there are any, no delta is applied.
        """
        for request_id in released:
            if (prefix := self._prefixes.pop(request_id, None)) is not None:
                self._ended(prefix.request)
            self._forget(request_id)
        missing = [delta.request_id for delta in deltas if not self._continues(delta)]
        if not missing:
            for delta in deltas:
                self._apply(delta)
            while len(self._prefixes) > max(self._capacity, len(deltas)):
                self._forget(self._prefixes.popitem(last=False)[0])
        return missing

    def _continues(self, delta: PrefixDelta) -> bool:
        if delta.offset == 0 and delta.params is not None:
            return delta.block_offset == 0
        held = self._prefixes.get(delta.request_id)
        return (
            held is not None
            and 0 < delta.offset <= len(held.request.token_ids)
            and 0 <= delta.block_offset <= len(held.block_ids)
        )

    def _apply(self, delta: PrefixDelta) -> None:
        if delta.params is not None:
            tokens, length = list(delta.token_ids), delta.input_length
            request = Request(
                self._owner + delta.request_id, tokens, delta.prompt_length, delta.params, input_length=length
            )
            self._prefixes[delta.request_id] = Prefix(request, block_table(delta.block_ids))
        else:
            prefix = self._prefixes[delta.request_id]
            prefix.request.token_ids[delta.offset :] = delta.token_ids
            prefix.block_ids[delta.block_offset :] = block_table(delta.block_ids)
        self._prefixes.move_to_end(delta.request_id)


class Acknowledged:
    """Router side: the tokens and blocks that a worker has acknowledged; the next deltas start there.

    Committed tokens only grow, so their length is enough; likewise the length of a block table that is the same object.
    Ids that have ended are sent with every request until a reply comes.
    """

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}
        self._tables: dict[str, tuple[Sequence[int], int]] = {}
        self._requested: dict[str, Request] = {}
        self._released: set[str] = set()

    def expect(self, rows: Sequence[ProposeRow | VerifyRow]) -> None:
        self._requested.update((row.request.request_id, row.request) for row in rows)

    def deltas(self, rows: Sequence[ProposeRow | VerifyRow]) -> tuple[list[PrefixDelta], list[str]]:
        """Return the deltas that a request for `rows` must carry, and the ids that have ended."""
        self.expect(rows)
        return [self._delta(row) for row in rows], list(self._released)

    def acknowledge(self, released: Iterable[str], rows: Iterable[ProposeRow | VerifyRow]) -> None:
        """Record that the worker has released these ids, and holds the tokens and blocks of these rows."""
        self._released.difference_update(released)
        for row in rows:
            request_id = row.request.request_id
            if not self.awaits(row.request):
                continue
            del self._requested[request_id]
            self._lengths[request_id] = len(row.request.token_ids)
            if isinstance(row, VerifyRow):
                self._tables[request_id] = row.block_ids, len(row.block_ids)

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; if the worker may hold it, tell it with the next request."""
        if request_id in self._lengths or request_id in self._requested:
            self._released.add(request_id)
        self._requested.pop(request_id, None)
        self.forget([request_id])

    def awaits(self, request: Request) -> bool:
        """Return whether a request is about to be sent, or has no reply yet, and has not ended."""
        return self._requested.get(request.request_id) is request

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._lengths.pop(request_id, None)
            self._tables.pop(request_id, None)

    def _delta(self, row: ProposeRow | VerifyRow) -> PrefixDelta:
        request = row.request
        offset = min(self._lengths.get(request.request_id, 0), len(request.token_ids))
        block_ids = row.block_ids if isinstance(row, VerifyRow) else ()
        known, length = self._tables.get(request.request_id, ((), 0)) if offset else ((), 0)
        block_offset = length if known is block_ids else _common_length(known[:length], block_ids)
        if block_offset < length:  # whether or not this delta arrives, only these blocks are sure
            self._tables[request.request_id] = known, block_offset
        return PrefixDelta(
            request_id=request.request_id,
            offset=offset,
            token_ids=request.token_ids[offset:],
            prompt_length=request.prompt_length,
            params=request.params if offset == 0 else None,
            block_offset=block_offset,
            block_ids=list(block_ids[block_offset:]),
            input_length=request.input_length,
        )


def _common_length(known: Sequence[int], new: Sequence[int]) -> int:
    differences = (i for i, (a, b) in enumerate(zip(known, new, strict=False)) if a != b)
    return next(differences, min(len(known), len(new)))
