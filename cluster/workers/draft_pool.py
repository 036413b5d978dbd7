"""DraftPool: in which order several groups' proposals are drafted, and which of them together; without sockets.

The proposal that is due first is drafted first. Others that wait are drafted in the same passes if their drafts are no
longer, so that it waits for none of them. If their rows are more than fit into a pass, each group gets an equal share;
what one leaves goes to the others. Texts that are long to catch up with get one pass of at most `CHUNK` tokens after
each of these batches. Between proposals, the group runs ahead whose next one is due first.

All groups share one cache. When it is full, the group that holds most of it loses its least recently used request.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from msgspec.structs import replace as changed

from cluster.protocol.messages import AnyReply, AnyRequest, PrefixMissing, Propose
from cluster.workers.responder import DraftResponder, failure
from engine.config import EngineConfig
from engine.drafting.model.draft_cache import MAX_TAIL, DraftCache
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.registry import method_of
from engine.drafting.run_ahead.passes import PassesAhead
from engine.drafting.run_ahead.shared_pass import advance_together
from engine.protocols import Draft, Drafter, ProposeRow, run_in_process

logger = logging.getLogger(__name__)

CHUNK = 256
"""Tokens of a pass that catches up with a text, at most: so much hardly takes a GPU longer than one token does."""


@dataclass(slots=True, eq=False)
class _Proposal:
    """A proposal that waits, or of which only some rows are drafted; `due` is when its drafts become worthless."""

    lease: DraftResponder
    request: Propose
    rows: list[ProposeRow]
    due: float
    answer: Callable[[AnyReply], None]
    is_caught_up: bool = False
    compute_s: float = 0.0
    drafts: list[Draft] = field(default_factory=list)

    @property
    def missing(self) -> list[ProposeRow]:
        """The rows without drafts."""
        return self.rows[len(self.drafts) :]

    @property
    def depth(self) -> int:
        """How many passes its drafts take."""
        return max((row.num_draft_tokens for row in self.missing), default=0)

    @property
    def ahead(self) -> PassesAhead | None:
        """What drafts it, and then runs ahead of its verdicts; None if it is drafted with others."""
        return self.lease.ahead if self.request.runs_ahead else None


class SharedCache(DraftCache):
    """A cache of several groups, of which none can take what the others need."""

    forget: Callable[[str], None]

    def evict(self, current: Container[str]) -> bool:
        """Forget the least recently used request of the group with the most blocks, none of the current ones."""
        num_blocks: Counter[str] = Counter()
        for name, prefix in self.prefixes.items():
            num_blocks[_owner(name)] += len(prefix.block_ids)
        victims = [name for name in self.prefixes if name not in current]
        if victims:
            self.forget(max(victims, key=lambda name: num_blocks[_owner(name)]))
        return bool(victims)


class DraftPool:
    """Drafts for the groups that have joined; `step` does the next thing. A request's name begins with its lease.

    Attributes:
        num_proposals: the proposals that were drafted since the start.
        num_batches: the batches in which they were drafted.
    """

    def __init__(
        self, draft: DraftModel, engine: EngineConfig, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Make the cache, whose size is planned in `engine`; a pass has at most `max_num_seqs` rows."""
        method = method_of(engine.drafting)
        self._chunk = min(CHUNK, engine.max_num_batched_tokens)
        self.cache = SharedCache(draft.backend, replace(engine, max_num_batched_tokens=self._chunk))
        self.cache.forget = self._forget
        self._draft, self._engine, self._make = replace(draft, cache=self.cache), engine, method.make
        self._drafter: Drafter = method.make(engine, replace(self._draft, run_ahead=False))
        """Drafts for all groups, but for rounds that run ahead."""
        self._make(engine, self._draft)  # plans the chains of leases that run ahead, which the warm-up then prepares
        self.num_proposals = self.num_batches = 0
        self._clock = clock
        self._leases: dict[int, DraftResponder] = {}
        self._waiting: list[_Proposal] = []

    def join(self, version: int, capacity: int) -> None:
        """Draft for another group, of which at most `capacity` requests are kept."""
        drafter = self._make(self._engine, self._draft) if self._draft.run_ahead else self._drafter
        self._leases[version] = DraftResponder(drafter, capacity=capacity, version=version, forget=self._forget)

    def leave(self, version: int) -> None:
        """Forget a group and all of its requests."""
        self._waiting = [one for one in self._waiting if one.lease is not self._leases[version]]
        for name in [name for name in self.cache.prefixes if _owner(name) == str(version)]:
            self._forget(name)
        del self._leases[version]

    def submit(self, version: int, request: AnyRequest, answer: Callable[[AnyReply], None]) -> None:
        """Take a group's request; a proposal waits until `step` has drafted its rows."""
        if isinstance(request, Propose):
            names = [f"{version}/{entry.prefix.request_id}" for entry in request.rows]
            rows = [
                changed(entry, prefix=changed(entry.prefix, request_id=name))
                for name, entry in zip(names, request.rows, strict=True)
            ]
            request = changed(request, rows=rows, released=[f"{version}/{one}" for one in request.released])
        lease = self._leases[version]
        read = lease.read(request)
        if isinstance(read, list):
            assert isinstance(request, Propose)
            self._waiting.append(_Proposal(lease, request, read, self._clock() + request.deadline_s, answer))
        elif isinstance(read, PrefixMissing):
            answer(changed(read, request_ids=[name.partition("/")[2] for name in read.request_ids]))
        elif read is not None:
            answer(read)

    def step(self) -> bool:
        """Draft for proposals and catch up, or launch a pass ahead; return whether there is more to do now."""
        now = self._clock()
        waiting = [one for one in self._waiting if one.due > now]  # nobody waits for the others any more
        self._waiting = sorted(waiting, key=lambda one: one.due)
        if not self._waiting:
            return self._run_ahead()
        lagging = [one for one in self._waiting if self._lacking(one)]
        if ready := [one for one in self._waiting if one not in lagging]:
            merged = [one for one in ready if not one.ahead and one.depth <= ready[0].depth]
            self._try(self._draft_rows, ready[:1] if ready[0].ahead else merged)
        if lagging:
            self._try(self._catch_up, lagging)
        return True

    def _try(self, work: Callable[[list[_Proposal]], None], proposals: list[_Proposal]) -> None:
        try:
            with torch.inference_mode():
                work(proposals)
        except Exception as error:  # an error costs these groups one round's drafts, not this process
            logger.exception("Drafting failed")
            for proposal in proposals:
                for row in proposal.rows:  # what the cache holds of them may not have been computed
                    self._forget(row.request.request_id)
                if proposal in self._waiting:
                    self._reply(proposal, failure(proposal.request, error, proposal.compute_s))

    def _lacking(self, proposal: _Proposal) -> list[ProposeRow]:
        """Return the rows that lack more tokens than the passes that draft compute, and can get them in chunks."""
        prefixes, rows = self.cache.prefixes, [] if proposal.is_caught_up else proposal.missing
        cached = [prefixes.get(row.request.request_id) for row in rows]
        lengths = [len(prefix.token_ids) if prefix is not None else 0 for prefix in cached]
        return [
            row
            for row, length in zip(rows, lengths, strict=True)
            if row.num_draft_tokens and len(row.request.token_ids) - 1 - length > MAX_TAIL
        ]

    def _catch_up(self, proposals: list[_Proposal]) -> None:
        """Compute one pass of the texts that proposals lack, most of it for those that are due first."""
        self._end_passes()
        current = {row.request.request_id for one in self._waiting for row in one.rows}
        requests = []
        for proposal in proposals:
            lacking, prefixes = self._lacking(proposal), self.cache.prefixes
            held = [prefixes[row.request.request_id] for row in lacking if row.request.request_id in prefixes]
            if proposal.lease.ahead is not None and any(prefix.scratch for prefix in held):
                proposal.lease.ahead.stop()  # it prepares drafts for a shorter text, where this one is computed now
            able = [row.request for row in lacking if self.cache.make_room(row, [], current)]
            proposal.is_caught_up = not able
            requests += able
        if not self.cache.compute_chunk(requests):
            for proposal in proposals:
                proposal.is_caught_up = True

    def _draft_rows(self, proposals: list[_Proposal]) -> None:
        started, ahead = self._clock(), proposals[0].ahead
        self._end_passes(but=ahead)
        counts = share_rows(proposals, self._engine.max_num_seqs if ahead is None else len(proposals[0].missing))
        for proposal in proposals:
            if ahead is None and proposal.lease.ahead is not None:
                proposal.lease.ahead.stop()
        drafter = ahead or self._drafter
        drafts = iter(run_in_process(drafter.propose([row for one in proposals for row in one.missing[: counts[one]]])))
        seconds = self._clock() - started
        self.num_batches += 1
        for proposal in proposals:
            proposal.compute_s += seconds
            proposal.drafts += islice(drafts, counts[proposal])
            if not proposal.missing:
                self.num_proposals += 1
                self._reply(proposal, proposal.lease.drafts(proposal.request, proposal.drafts, proposal.compute_s))
        if ahead is not None:
            ahead.settle()  # it must not hold blocks for an answer while a request of its group is evicted

    def _reply(self, proposal: _Proposal, reply: AnyReply) -> None:
        self._waiting.remove(proposal)
        proposal.answer(reply)

    def _run_ahead(self) -> bool:
        """Launch at most one pass ahead, of the group that is due first and of others, without waiting for its end."""
        leases = [one for one in self._leases.values() if one.ahead is not None and one.ahead.has_time]
        aheads = sorted((one.ahead for one in leases if one.ahead is not None), key=lambda ahead: ahead.due)
        if aheads and aheads[0].is_computing:
            return leases[0].work()
        self._end_passes()
        try:
            if aheads:
                advance_together(aheads, self._engine.max_num_seqs)
        except Exception:  # an error costs only prepared drafts
            logger.exception("Running ahead failed")
            for ahead in aheads:
                ahead.forget()
        return bool(aheads)

    def _end_passes(self, but: PassesAhead | None = None) -> None:
        """Time the passes ahead that were launched last, before the device computes something else."""
        for lease in self._leases.values():
            if lease.ahead is not None and lease.ahead is not but:
                lease.ahead.end_pass()

    def _forget(self, name: str) -> None:
        """Forget a request, which has ended or makes room for others."""
        if (ahead := self._leases[int(_owner(name))].ahead) is not None:
            ahead.release(name)
        self._drafter.release(name)


def share_rows(proposals: Sequence[_Proposal], room: int) -> Counter[_Proposal]:
    """Return how many rows of each proposal are drafted in one pass: all, or equal shares of the room."""
    longest = max(len(one.missing) for one in proposals)
    turns = (one for turn in range(longest) for one in proposals if turn < len(one.missing))
    return Counter(islice(turns, room))


def _owner(name: str) -> str:
    return name.partition("/")[0]
