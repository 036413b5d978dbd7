"""DraftQueue: in which order groups' proposals are drafted, and which proposals together; without sockets.

The proposal that is due first is drafted first. Waiting proposals share its passes if their drafts are not longer. If
the rows do not fit into a pass, each group gets an equal share. After each batch, texts that the cache lacks get a pass
of at most `CHUNK` tokens. Between proposals, the group whose next proposal is due first runs ahead.

All groups share one cache for each draft model. When it is full, the group that holds most of it loses its least
recently used request. Of several drafts, the passes of one follow those of another.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from cluster.protocol.messages import AnyReply, AnyRequest, Drafts, Failure, Ping, Pong, PrefixMissing, Propose
from cluster.protocol.prefix_delta import PrefixTable
from cluster.workers.proposals import Group, Proposal, share_rows
from engine.config import EngineConfig
from engine.drafting.learning.study import Study
from engine.drafting.model.draft_cache import MAX_TAIL, CachedPrefix, DraftCache
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.feature_cache import FeatureCache, make_cache
from engine.drafting.model.several import SeveralDrafters
from engine.drafting.registry import method_of
from engine.drafting.run_ahead.passes import PassesAhead
from engine.drafting.run_ahead.shared_pass import advance_together
from engine.protocols import ProposeRow, run_in_process
from engine.stats.preparation import PREPARATION

logger = logging.getLogger(__name__)

CHUNK = 256
"""The most tokens of a pass that catches up with a text: a GPU takes hardly longer for so many than for one token."""
_POLL_S = 50e-6
"""Pause between two looks for a request while the device computes a pass ahead."""


class DraftQueue:
    """Drafts for the groups that send proposals. A request's name begins with its lease."""

    def __init__(
        self,
        drafts: Sequence[DraftModel],
        engine: EngineConfig,
        *,
        capacity: int,
        is_shared: bool = True,
        study: Study | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make the caches that `engine` plans; `capacity` is the most requests of a group whose texts are kept.

        A draft that learns has a `study`; there is then no other draft.
        """
        method, chunk = method_of(engine.drafting), engine.max_num_batched_tokens
        # A group that has the worker to itself waits for nobody, so its drafter catches up with whole texts.
        chunk = min(CHUNK, chunk) if is_shared else chunk
        self.caches = [make_cache(draft, replace(engine, max_num_batched_tokens=chunk)) for draft in drafts]
        self._drafts = [replace(draft, cache=cache) for draft, cache in zip(drafts, self.caches, strict=True)]
        self._engine, self._make = engine, method.make
        self._drafters = [method.make(engine, replace(draft, run_ahead=False)) for draft in self._drafts]
        """Draft for all groups, but for rounds that run ahead."""
        for index, cache in enumerate(self.caches):
            cache.forget = partial(self._forget_in, index)
            cache.choose_victim = partial(self._choose_victim, cache)
            method.make(engine, self._drafts[index])  # plans the chains of run-ahead, which the warm-up then prepares
        self.num_proposals = self.num_batches = 0
        self._capacity, self._clock, self._study, self._is_shared = capacity, clock, study, is_shared
        self._groups: dict[int, Group] = {}
        self._waiting: list[Proposal] = []

    def leave(self, version: int) -> None:
        if (group := self._groups.get(version)) is not None:
            self._waiting = [proposal for proposal in self._waiting if proposal.group is not group]
            for name in {name for cache in self.caches for name in cache.prefixes if _lease_of(name) == version}:
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
        elif wrong := {entry.draft_index for entry in request.rows} - {*range(len(self._drafts))}:
            message = f"a row names draft {wrong.pop()}, of {len(self._drafts)}"
            answer(Failure(request.round, version, 0.0, message))
        else:
            group = self._groups.get(version) or self._join(version)
            if missing := group.table.update(request.released, [entry.prefix for entry in request.rows]):
                answer(PrefixMissing(request.round, version, 0.0, missing))
            else:
                texts = [group.table[entry.prefix.request_id].request for entry in request.rows]
                rows = [
                    ProposeRow(text, entry.num_draft_tokens, draft_index=entry.draft_index)
                    for text, entry in zip(texts, request.rows, strict=True)
                ]
                self._waiting.append(Proposal(group, request, rows, self._clock() + request.deadline_s, answer))
                if self._study is not None:
                    self._study.watch.observe([row.request for row in rows])

    def _join(self, version: int) -> Group:
        made = [self._make(self._engine, draft) for draft in self._drafts if draft.run_ahead]
        aheads = [drafter for drafter in made if isinstance(drafter, PassesAhead)]
        for ahead in aheads:
            ahead.stats = aheads[0].stats
        features_of = self.caches[0].features_of if isinstance(self.caches[0], FeatureCache) else None
        ended = {} if self._study is None else {"ended": partial(self._study.ended, features_of=features_of)}
        table = PrefixTable(self._capacity, self._forget, owner=f"{version}/", **ended)
        group = self._groups[version] = Group(table, aheads)
        return group

    def step(self) -> bool:
        """Draft for proposals and catch up, or launch a pass ahead; return whether there is more to do now."""
        now = self._clock()
        in_time = [proposal for proposal in self._waiting if proposal.due > now]  # nobody waits for later drafts
        self._waiting = sorted(in_time, key=lambda proposal: proposal.due)
        if not self._waiting:
            self._take_weights()
            return self._run_ahead()
        lagging = [proposal for proposal in self._waiting if self._lacking(proposal)] if len(self._groups) > 1 else []
        if ready := [proposal for proposal in self._waiting if proposal not in lagging]:
            merged = [proposal for proposal in ready if not proposal.aheads and proposal.depth <= ready[0].depth]
            self._try(self._draft_rows, ready[:1] if ready[0].aheads else merged)
        if lagging:
            self._try(self._catch_up, lagging)
        return True

    def _try(self, work: Callable[[list[Proposal]], None], proposals: list[Proposal]) -> None:
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

    def _lacking(self, proposal: Proposal) -> list[ProposeRow]:
        """Return the rows with too many uncached tokens for the passes that draft, which `_catch_up` computes."""
        rows = [] if proposal.is_caught_up else proposal.missing
        cached = [self._cached(row) for row in rows]
        lengths = [len(prefix.token_ids) if prefix is not None else 0 for prefix in cached]
        return [
            row
            for row, length in zip(rows, lengths, strict=True)
            if row.num_draft_tokens and len(row.request.token_ids) - 1 - length > MAX_TAIL
        ]

    def _catch_up(self, proposals: list[Proposal]) -> None:
        """Compute one pass of the texts that the cache lacks, the earliest proposal's first."""
        self._end_passes()
        current = {row.request.request_id for proposal in self._waiting for row in proposal.rows}
        rows = []
        for proposal in proposals:
            lacking = self._lacking(proposal)
            if any(prefix is not None and prefix.scratch for prefix in map(self._cached, lacking)):
                for ahead in proposal.group.aheads:
                    ahead.stop()  # it prepares drafts for a shorter text, where this one is computed now
            able = [row for row in lacking if self.caches[row.draft_index].make_room(row, [], current)]
            proposal.is_caught_up = not able
            rows += able
        requests = [[row.request for row in rows if row.draft_index == index] for index in range(len(self.caches))]
        if not any([cache.compute_chunk(its) for cache, its in zip(self.caches, requests, strict=True)]):  # noqa: C419
            for proposal in proposals:
                proposal.is_caught_up = True

    def _draft_rows(self, proposals: list[Proposal]) -> None:
        started, aheads = self._clock(), proposals[0].aheads
        self._end_passes(but=aheads)
        counts = share_rows(proposals, len(proposals[0].missing) if aheads else self._engine.max_num_seqs)
        for ahead in [ahead for proposal in proposals for ahead in proposal.group.aheads if not aheads]:
            ahead.stop()
        rows = [row for proposal in proposals for row in proposal.missing[: counts[proposal]]]
        drafts = iter(run_in_process(SeveralDrafters(aheads or self._drafters).propose(rows)))
        seconds = self._clock() - started
        self.num_batches += 1
        for proposal in proposals:
            proposal.compute_s += seconds
            proposal.drafts += islice(drafts, counts[proposal])
            if not proposal.missing:
                self.num_proposals += 1
                if self._study is not None:
                    self._study.watch.drafted(proposal.rows, proposal.drafts)
                self._reply(proposal, self._drafts_of(proposal))
        for ahead in aheads:
            ahead.settle()  # it must not hold blocks for an answer while a request of its group is evicted

    def _reply(self, proposal: Proposal, reply: AnyReply) -> None:
        self._waiting.remove(proposal)
        proposal.answer(reply)

    def _drafts_of(self, proposal: Proposal) -> Drafts:
        request, aheads = proposal.request, proposal.group.aheads
        stats, features = aheads[0].stats if aheads else None, self._drafts[0].features
        counts = {} if features is None else features.counts
        learned = {} if self._study is None or self._is_shared else self._study.counts  # a pool's worker tells itself
        common = request.round, request.version, proposal.compute_s, proposal.drafts
        return Drafts(*common, stats, PREPARATION.counts, counts, learned)

    def _take_weights(self) -> None:
        """Let learned weights take over, while nothing waits and nothing is compiled with the former ones."""
        backend = self._drafts[0].backend
        if self._study is None or backend.compiling or (weights := self._study.taken()) is None:
            return
        self._end_passes()
        backend.wait()
        backend.assign(weights)
        for ahead in [ahead for group in self._groups.values() for ahead in group.aheads]:
            ahead.stop()
        self.caches[0].restart()

    def _run_ahead(self) -> bool:
        """Launch the next shared pass ahead, unless a pass is under way; return whether groups have time for more."""
        aheads = [ahead for group in self._groups.values() for ahead in group.aheads if ahead.has_time]
        aheads.sort(key=lambda ahead: ahead.due)
        if any(ahead.is_computing for ahead in aheads):
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

    def _end_passes(self, but: Sequence[PassesAhead] = ()) -> None:
        """Time the last passes ahead, before the device computes something else."""
        for ahead in [ahead for group in self._groups.values() for ahead in group.aheads if ahead not in but]:
            ahead.end_pass()

    def _cached(self, row: ProposeRow) -> CachedPrefix | None:
        return self.caches[row.draft_index].prefixes.get(row.request.request_id)

    def _forget(self, name: str) -> None:
        for index in range(len(self.caches)):
            self._forget_in(index, name)

    def _forget_in(self, index: int, name: str) -> None:
        if aheads := self._groups[_lease_of(name)].aheads:
            aheads[index].release(name)
        self._drafters[index].release(name)

    def _choose_victim(self, cache: DraftCache, names: Sequence[str]) -> str:
        """Return the least recently used request of the group with the most blocks."""
        num_blocks: Counter[int] = Counter()
        for name, prefix in cache.prefixes.items():
            num_blocks[_lease_of(name)] += len(prefix.block_ids)
        return max(names, key=lambda name: num_blocks[_lease_of(name)])


def _lease_of(name: str) -> int:
    return int(name.partition("/")[0])
