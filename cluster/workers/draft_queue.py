"""DraftQueue: in which order groups' proposals are drafted, and which of them together; without sockets.

The proposal that is due first is drafted first. Others that wait are drafted in the same passes if their drafts are no
longer, so that it waits for none of them. If their rows are more than fit into a pass, each group gets an equal share;
what one leaves goes to the others. Texts that are long to catch up with get one pass of at most `CHUNK` tokens after
each of these batches. Between proposals, the group runs ahead whose next one is due first.

All groups share one cache. When it is full, the group that holds most of it loses its least recently used request. A
group that has the worker to itself waits for nobody, so its drafter catches up with whole texts by itself.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from cluster.protocol.messages import AnyReply, AnyRequest, Drafts, Failure, Ping, Pong, PrefixMissing, Propose
from cluster.protocol.prefix_delta import PrefixTable
from engine.config import EngineConfig
from engine.drafting.model.draft_cache import MAX_TAIL
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.feature_cache import make_cache
from engine.drafting.registry import method_of
from engine.drafting.run_ahead.passes import PassesAhead
from engine.drafting.run_ahead.shared_pass import advance_together
from engine.protocols import Draft, Drafter, ProposeRow, run_in_process
from engine.stats.preparation import PREPARATION

logger = logging.getLogger(__name__)

CHUNK = 256
"""Tokens of a pass that catches up with a text, at most: so much hardly takes a GPU longer than one token does."""
_POLL_S = 50e-6
"""Pause between two looks for a request while the device computes a pass ahead."""


@dataclass(slots=True, eq=False)
class _Group:
    """The group of a lease: the prefixes that it has sent, and its drafter that runs ahead, if the worker does."""

    table: PrefixTable
    ahead: PassesAhead | None


@dataclass(slots=True, eq=False)
class _Proposal:
    """A proposal that waits, or of which only some rows are drafted; `due` is when its drafts become worthless."""

    group: _Group
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
        return self.group.ahead if self.request.runs_ahead else None


class DraftQueue:
    """Drafts for the groups that send proposals; `step` does the next thing. A request's name begins with its lease.

    Attributes:
        num_proposals: the proposals that were drafted since the start.
        num_batches: the batches in which they were drafted.
    """

    def __init__(
        self,
        draft: DraftModel,
        engine: EngineConfig,
        *,
        capacity: int,
        is_shared: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make the cache, whose size is planned in `engine`; a pass has at most `max_num_seqs` rows.

        Args:
            capacity: the most requests of a group whose texts are kept.
            is_shared: whether there may be several groups.
        """
        method, chunk = method_of(engine.drafting), engine.max_num_batched_tokens
        chunk = min(CHUNK, chunk) if is_shared else chunk
        self.cache = make_cache(draft, replace(engine, max_num_batched_tokens=chunk))
        self.cache.forget, self.cache.choose_victim = self._forget, self._choose_victim
        self._draft, self._engine, self._make = replace(draft, cache=self.cache), engine, method.make
        self._drafter: Drafter = method.make(engine, replace(self._draft, run_ahead=False))
        """Drafts for all groups, but for rounds that run ahead."""
        self._make(engine, self._draft)  # plans the chains of groups that run ahead, which the warm-up then prepares
        self.num_proposals = self.num_batches = 0
        self._capacity, self._clock = capacity, clock
        self._groups: dict[int, _Group] = {}
        self._waiting: list[_Proposal] = []

    def leave(self, version: int) -> None:
        """Forget the group of a lease and all of its requests."""
        if (group := self._groups.get(version)) is not None:
            self._waiting = [one for one in self._waiting if one.group is not group]
            for name in [name for name in self.cache.prefixes if _lease_of(name) == version]:
                self._forget(name)
            del self._groups[version]

    def submit(self, version: int, request: AnyRequest, answer: Callable[[AnyReply], None]) -> None:
        """Take a request under a lease; a proposal waits until `step` has drafted its rows."""
        if request.version != version:
            return
        if isinstance(request, Ping):
            answer(Pong(request.round, version, 0.0))
        elif not isinstance(request, Propose):
            message = f"a draft worker does not accept {type(request).__name__}"
            answer(Failure(request.round, version, 0.0, message))
        else:
            group = self._groups.get(version) or self._join(version)
            if missing := group.table.update(request.released, [entry.prefix for entry in request.rows]):
                answer(PrefixMissing(request.round, version, 0.0, missing))
            else:
                held = [group.table[entry.prefix.request_id].request for entry in request.rows]
                rows = [ProposeRow(one, entry.num_draft_tokens) for one, entry in zip(held, request.rows, strict=True)]
                self._waiting.append(_Proposal(group, request, rows, self._clock() + request.deadline_s, answer))

    def _join(self, version: int) -> _Group:
        drafter = self._make(self._engine, self._draft) if self._draft.run_ahead else self._drafter
        table = PrefixTable(self._capacity, self._forget, owner=f"{version}/")
        group = self._groups[version] = _Group(table, drafter if isinstance(drafter, PassesAhead) else None)
        return group

    def step(self) -> bool:
        """Draft for proposals and catch up, or launch a pass ahead; return whether there is more to do now."""
        now = self._clock()
        waiting = [one for one in self._waiting if one.due > now]  # nobody waits for the others any more
        self._waiting = sorted(waiting, key=lambda one: one.due)
        if not self._waiting:
            return self._run_ahead()
        lagging = [one for one in self._waiting if self._lacking(one)] if len(self._groups) > 1 else []
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
                    message, request = f"{type(error).__name__}: {error}", proposal.request
                    self._reply(proposal, Failure(request.round, request.version, proposal.compute_s, message))

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
            if proposal.group.ahead is not None and any(prefix.scratch for prefix in held):
                proposal.group.ahead.stop()  # it prepares drafts for a shorter text, where this one is computed now
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
            if ahead is None and proposal.group.ahead is not None:
                proposal.group.ahead.stop()
        drafter = ahead or self._drafter
        drafts = iter(run_in_process(drafter.propose([row for one in proposals for row in one.missing[: counts[one]]])))
        seconds = self._clock() - started
        self.num_batches += 1
        for proposal in proposals:
            proposal.compute_s += seconds
            proposal.drafts += islice(drafts, counts[proposal])
            if not proposal.missing:
                self.num_proposals += 1
                self._reply(proposal, self._drafts_of(proposal))
        if ahead is not None:
            ahead.settle()  # it must not hold blocks for an answer while a request of its group is evicted

    def _reply(self, proposal: _Proposal, reply: AnyReply) -> None:
        self._waiting.remove(proposal)
        proposal.answer(reply)

    def _drafts_of(self, proposal: _Proposal) -> Drafts:
        request, ahead = proposal.request, proposal.group.ahead
        stats, features = None if ahead is None else ahead.stats, self._draft.features
        counts = {} if features is None else features.counts
        seconds = proposal.compute_s
        return Drafts(request.round, request.version, seconds, proposal.drafts, stats, PREPARATION.counts, counts)

    def _run_ahead(self) -> bool:
        """Launch at most one pass ahead, of the group that is due first and of others, without waiting for its end."""
        aheads = [group.ahead for group in self._groups.values() if group.ahead is not None and group.ahead.has_time]
        aheads.sort(key=lambda ahead: ahead.due)
        if aheads and aheads[0].is_computing:
            time.sleep(_POLL_S)
            return True
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
        for group in self._groups.values():
            if group.ahead is not None and group.ahead is not but:
                group.ahead.end_pass()

    def _forget(self, name: str) -> None:
        """Forget a request, which has ended or makes room for others."""
        if (ahead := self._groups[_lease_of(name)].ahead) is not None:
            ahead.release(name)
        self._drafter.release(name)

    def _choose_victim(self, names: Sequence[str]) -> str:
        """Return the least recently used request of the group with the most blocks."""
        num_blocks: Counter[int] = Counter()
        for name, prefix in self.cache.prefixes.items():
            num_blocks[_lease_of(name)] += len(prefix.block_ids)
        return max(names, key=lambda name: num_blocks[_lease_of(name)])


def share_rows(proposals: Sequence[_Proposal], room: int) -> Counter[_Proposal]:
    """Return how many rows of each proposal are drafted in one pass: all, or equal shares of the room."""
    counts = Counter({proposal: len(proposal.missing) for proposal in proposals})
    if counts.total() <= room:
        return counts
    longest = max(counts.values())
    turns = (proposal for turn in range(longest) for proposal in proposals if turn < counts[proposal])
    return Counter(islice(turns, room))


def _lease_of(name: str) -> int:
    return int(name.partition("/")[0])
