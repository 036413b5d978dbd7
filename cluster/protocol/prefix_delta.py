"""What a worker remembers of each request, and what the Router knows that it remembers.

The Router owns the committed tokens; a worker's table is a cache of them. Both sides move by the same rule: the
Router sends what lies behind the length the worker last *answered* for, so a delta is right whether or not a message in
between arrived. A table that was restarted, evicted or confused reports the ids it misses and is sent the whole prefix.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.protocol.messages import PrefixDelta
from engine.protocols import ProposeRow, Request, VerifyRow


@dataclass(slots=True)
class Prefix:
    """One request as a worker knows it, and its block table (the target's; empty in a draft worker)."""

    request: Request
    block_ids: list[int]


class PrefixTable:
    """Worker side: request id -> Prefix, at most `capacity` of them, the least recently used ones leave first.

    It owns the requests it holds: `apply` alone changes their `token_ids`.
    The same deltas in the same order leave the same table, so the ranks of one target agree without talking.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._prefixes: OrderedDict[str, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    def __getitem__(self, request_id: str) -> Prefix:
        return self._prefixes[request_id]

    def missing(self, deltas: Iterable[PrefixDelta]) -> list[str]:
        """Return the ids of the deltas that do not join on to what is held."""
        return [delta.request_id for delta in deltas if not self._joins(delta)]

    def apply(self, deltas: Sequence[PrefixDelta]) -> list[str]:
        """Bring the table up to date with deltas of which none is missing.

        Returns:
            The ids that were evicted to stay within the capacity; never one of the deltas' own.
        """
        for delta in deltas:
            self._apply(delta)
        excess = len(self._prefixes) - max(self._capacity, len(deltas))
        return [self._prefixes.popitem(last=False)[0] for _ in range(excess)]

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._prefixes.pop(request_id, None)

    def _joins(self, delta: PrefixDelta) -> bool:
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
            request = Request(delta.request_id, list(delta.token_ids), delta.prompt_length, delta.params)
            self._prefixes[delta.request_id] = Prefix(request, list(delta.block_ids))
        else:
            prefix = self._prefixes[delta.request_id]
            prefix.request.token_ids[delta.offset :] = delta.token_ids
            prefix.block_ids[delta.block_offset :] = delta.block_ids
        self._prefixes.move_to_end(delta.request_id)


class Acknowledged:
    """Router side: what one peer has answered for, from which the next deltas are made.

    Token ids are committed and only ever grow, so their length is enough; a block table may change altogether.
    Ids that have ended are told with every request until one is answered.
    """

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}
        self._block_ids: dict[str, list[int]] = {}
        self._asked: set[str] = set()
        self._released: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._lengths

    def ask(self, rows: Sequence[ProposeRow | VerifyRow]) -> tuple[list[PrefixDelta], list[str]]:
        """Return what the peer must be told before it can compute `rows`, and the ids that have ended."""
        self._asked = {row.request.request_id for row in rows}
        return [self._delta(row) for row in rows], list(self._released)

    def answered(self, released: Iterable[str]) -> None:
        """Record that the peer knows that these ids have ended."""
        self._released.difference_update(released)

    def acknowledge(self, rows: Iterable[ProposeRow | VerifyRow]) -> None:
        """Record that the peer has answered for these rows."""
        for row in rows:
            request_id = row.request.request_id
            if request_id in self._released:
                continue
            self._lengths[request_id] = len(row.request.token_ids)
            if isinstance(row, VerifyRow):
                self._block_ids[request_id] = list(row.block_ids)

    def release(self, request_id: str) -> None:
        """Forget a request that has ended, and tell the peer if it knows of it."""
        if request_id in self._lengths or request_id in self._asked:
            self._released.add(request_id)
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Take a request as unknown to the peer."""
        self._lengths.pop(request_id, None)
        self._block_ids.pop(request_id, None)

    def clear(self) -> None:
        """Take everything as unknown: the peer is a new one."""
        self._lengths.clear()
        self._block_ids.clear()
        self._asked.clear()
        self._released.clear()

    def _delta(self, row: ProposeRow | VerifyRow) -> PrefixDelta:
        request = row.request
        offset = min(self._lengths.get(request.request_id, 0), len(request.token_ids))
        block_ids = row.block_ids if isinstance(row, VerifyRow) else ()
        known = self._block_ids.get(request.request_id, []) if offset else []
        block_offset = _common_length(known, block_ids)
        return PrefixDelta(
            request_id=request.request_id,
            offset=offset,
            token_ids=request.token_ids[offset:],
            prompt_length=request.prompt_length,
            params=request.params if offset == 0 else None,
            block_offset=block_offset,
            block_ids=list(block_ids[block_offset:]),
        )


def _common_length(known: list[int], new: Sequence[int]) -> int:
    """Return how many leading entries two block tables share; the usual case, one more block, is one comparison."""
    if known == list(new[: len(known)]):
        return len(known)
    for i, (a, b) in enumerate(zip(known, new, strict=False)):
        if a != b:
            return i
    return min(len(known), len(new))
