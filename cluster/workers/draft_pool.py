"""DraftPool: in which order several groups' proposals are drafted, and which of them together; without sockets.

The proposal that is due first is drafted first. Others that wait are drafted in the same passes if their drafts are no
longer, so that it waits for none of them. If their rows are more than fit into a pass, each group gets an equal share;
what one leaves goes to the others. A proposal with a long text to catch up with takes turns with the others, a pass of
at most `CHUNK` tokens at a time. Between proposals, the group runs ahead whose next one is due first.

All groups share one cache. When it is full, the group that holds most of it loses its least recently used request.
"""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec
import torch

from cluster.protocol.messages import AnyReply, AnyRequest, Drafts, Failure, Ping, Pong, PrefixMissing, Propose
from cluster.protocol.prefix_delta import PrefixTable
from engine.config import EngineConfig
from engine.control.stats import PREPARATION
from engine.drafting.model.draft_cache import MAX_TAIL, DraftCache
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.registry import choose_method
from engine.drafting.run_ahead.passes import PassesAhead
from engine.protocols import Draft, Drafter, ProposeRow, run_in_process

logger = logging.getLogger(__name__)

CHUNK = 256
"""Tokens of a pass that catches up with a text, at most: so much hardly takes a GPU longer than one token does."""
_POLL_S = 50e-6
"""Pause between two looks for a request while the device computes a pass ahead."""

Answer = Callable[[AnyReply], None]


@dataclass(slots=True, eq=False)
class _Group:
    """A lease: the prefixes of its requests, whose ids begin with `version`, and what drafts ahead for it."""

    version: int
    table: PrefixTable
    ahead: PassesAhead | None
    may_advance: bool = False


@dataclass(slots=True, eq=False)
class _Proposal:
    """A proposal that waits, or of which only some rows are drafted; `due` is when its drafts become worthless."""

    group: _Group
    request: Propose
    rows: list[ProposeRow]
    due: float
    answer: Answer
    is_ahead: bool
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
    """Drafts for the groups that have joined; `step` does the next thing.

    Attributes:
        num_proposals: the proposals that were drafted since the start.
        num_batches: the batches in which they were drafted.
    """

    def __init__(
        self, draft: DraftModel, engine: EngineConfig, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Make the cache, whose size is planned in `engine`; a pass has at most `max_num_seqs` rows."""
        method = choose_method(engine, has_draft_model=True)
        chunk = min(CHUNK, engine.max_num_batched_tokens)
        self.cache = SharedCache(draft.backend, replace(engine, max_num_batched_tokens=chunk))
        self.cache.forget = self._forget
        self._chunk = chunk
        self._draft, self._engine, self._make = replace(draft, cache=self.cache), engine, method.make
        self._drafter: Drafter = method.make(engine, replace(self._draft, run_ahead=False))
        """Drafts for all groups that do not run ahead."""
        self._merges = not (draft.run_ahead and method.drafts_trees)
        """Whether rounds without running ahead are drafted by it; a tree that was kept belongs to its own drafter."""
        self.num_proposals = self.num_batches = 0
        self._clock = clock
        self._groups: dict[int, _Group] = {}
        self._waiting: list[_Proposal] = []
        self._is_turn_of_chunk = False
        self._last: PassesAhead | None = None

    def join(self, version: int, capacity: int) -> None:
        """Draft for another group, of which at most `capacity` requests are kept."""
        ahead = self._make(self._engine, self._draft) if self._draft.run_ahead else None
        self._groups[version] = _Group(version, PrefixTable(capacity, self._forget), cast("PassesAhead | None", ahead))

    def leave(self, version: int) -> None:
        """Forget a group and all of its requests."""
        group = self._groups[version]
        self._waiting = [one for one in self._waiting if one.group is not group]
        for name in {*group.table, *(name for name in self.cache.prefixes if _owner(name) == str(version))}:
            self._forget(name)
        del self._groups[version]

    def submit(self, version: int, request: AnyRequest, answer: Answer) -> None:
        """Take a group's request; a proposal waits until `step` has drafted its rows."""
        if request.version != version:
            return None
        if isinstance(request, Ping):
            return answer(Pong(request.round, version, 0.0))
        if not isinstance(request, Propose):
            return answer(Failure(request.round, version, 0.0, f"a pool does not accept {type(request).__name__}"))
        group = self._groups[version]
        prefixes = [entry.prefix for entry in request.rows]
        deltas = [msgspec.structs.replace(one, request_id=_name(version, one.request_id)) for one in prefixes]
        if missing := group.table.update([_name(version, one) for one in request.released], deltas):
            names = [name.partition("/")[2] for name in missing]
            return answer(PrefixMissing(request.round, version, 0.0, names))
        rows = [
            ProposeRow(group.table[delta.request_id].request, entry.num_draft_tokens)
            for delta, entry in zip(deltas, request.rows, strict=True)
        ]
        is_ahead = group.ahead is not None and (request.runs_ahead or not self._merges)
        due = self._clock() + request.deadline_s
        self._waiting.append(_Proposal(group, request, rows, due, answer, is_ahead))
        return None

    def step(self) -> bool:
        """Draft for proposals, catch up, or launch a pass ahead; return whether there is more to do now."""
        now = self._clock()
        self._waiting = [one for one in self._waiting if one.due > now]  # nobody waits for the others any more
        if not self._waiting:
            return self._run_ahead()
        ready = [one for one in self._waiting if one.is_caught_up or self._lag(one) <= self._chunk]
        lagging = [one for one in self._waiting if one not in ready]
        is_chunk = bool(lagging) and (self._is_turn_of_chunk or not ready)
        self._is_turn_of_chunk = not is_chunk
        first = min(lagging if is_chunk else ready, key=lambda one: one.due)
        shares = [(first, len(first.missing))]
        if not is_chunk and not first.is_ahead:
            merged = [one for one in ready if not one.is_ahead and one.depth <= first.depth]
            shares = share_rows(merged, self._engine.max_num_seqs)
        try:
            with torch.inference_mode():
                self._settle(first)
                if is_chunk:
                    self._catch_up(first)
                else:
                    self._draft_rows(shares)
        except Exception as error:  # an error costs these groups one round's drafts, not this process
            logger.exception("Drafting failed")
            for proposal in {one for one, _ in shares} & set(self._waiting):
                for row in proposal.rows:  # what the cache holds of them may not have been computed
                    self._forget(row.request.request_id)
                self._reply(proposal, f"{type(error).__name__}: {error}")
        return True

    def _lag(self, proposal: _Proposal) -> int:
        """Return how many tokens must be computed before the passes that draft."""
        lags = (self._missing(row) for row in proposal.missing if row.num_draft_tokens)
        return sum(lag for lag in lags if lag > MAX_TAIL)

    def _missing(self, row: ProposeRow) -> int:
        """Return how many tokens before the last one are not in the cache."""
        prefix = self.cache.prefixes.get(row.request.request_id)
        return len(row.request.token_ids) - 1 - (len(prefix.token_ids) if prefix is not None else 0)

    def _settle(self, first: _Proposal) -> None:
        """Let no group hold blocks for an answer that it has not settled, since a request of its may be evicted now."""
        for group in self._groups.values():
            if group.ahead is not None and not (first.is_ahead and group is first.group):
                group.ahead.settle()

    def _catch_up(self, proposal: _Proposal) -> None:
        rows = [row for row in proposal.missing if row.num_draft_tokens and self._missing(row) > MAX_TAIL]
        names = {row.request.request_id for row in rows}
        requests = [row.request for row in rows if self.cache.make_room(row, [], names)]
        proposal.is_caught_up = not self.cache.compute_chunk(requests)

    def _draft_rows(self, shares: Sequence[tuple[_Proposal, int]]) -> None:
        started, drafter = self._clock(), self._drafter
        for proposal, _ in shares:
            if (ahead := proposal.group.ahead) is not None and proposal.is_ahead:
                ahead.runs_ahead, drafter = proposal.request.runs_ahead, cast("Drafter", ahead)
            elif ahead is not None:
                ahead.stop()
        drafts = iter(run_in_process(drafter.propose([row for one, count in shares for row in one.missing[:count]])))
        seconds = self._clock() - started
        self.num_batches += 1
        for proposal, count in shares:
            proposal.compute_s += seconds
            proposal.drafts += itertools.islice(drafts, count)
            if not proposal.missing:
                self.num_proposals += 1
                self._reply(proposal)

    def _reply(self, proposal: _Proposal, problem: str = "") -> None:
        self._waiting.remove(proposal)
        group, common = proposal.group, (proposal.request.round, proposal.group.version, proposal.compute_s)
        group.may_advance = group.ahead is not None
        stats = None if group.ahead is None else group.ahead.stats
        proposal.answer(
            Failure(*common, problem) if problem else Drafts(*common, proposal.drafts, stats, PREPARATION.counts)
        )

    def _run_ahead(self) -> bool:
        """Launch at most one pass ahead, without waiting for its end."""
        able = [group for group in self._groups.values() if group.may_advance and group.ahead and group.ahead.has_time]
        if not able:
            return False
        group = min(able, key=lambda one: one.ahead.due if one.ahead else 0.0)
        ahead = cast("PassesAhead", group.ahead)
        if ahead.is_computing:
            time.sleep(_POLL_S)
            return True
        if self._last is not None and self._last is not ahead:
            self._last.end_pass()
        self._last = ahead
        try:
            group.may_advance = ahead.advance()
        except Exception:  # as above: an error costs only prepared drafts
            logger.exception("Running ahead failed")
            ahead.stop()
            group.may_advance = False
        return True

    def _forget(self, name: str) -> None:
        """Forget a request, which has ended or makes room for others."""
        ahead = self._groups[int(_owner(name))].ahead
        if ahead is not None:
            ahead.release(name)
        self._drafter.release(name)


def share_rows(proposals: Sequence[_Proposal], room: int) -> list[tuple[_Proposal, int]]:
    """Return how many rows of each proposal are drafted in one pass: all, or equal shares of the room."""
    shares = []
    by_size = sorted(proposals, key=lambda one: (len(one.missing), one.due))
    for num_left, proposal in zip(range(len(by_size), 0, -1), by_size, strict=True):
        count = min(len(proposal.missing), -(-room // num_left))
        room -= count
        shares.append((proposal, count))
    return [(proposal, count) for proposal, count in shares if count or not proposal.missing]


def _name(version: int, request_id: str) -> str:
    return f"{version}/{request_id}"


def _owner(name: str) -> str:
    return name.partition("/")[0]
