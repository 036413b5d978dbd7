"""RunAheadTreeDrafter: after it has sent a tree, it goes on growing it while the target verifies.

Draft and target share their noise, so the target follows one path through the tree of all candidates, until it leaves
what was computed of it. The verdict on the tree that was sent is the first part of that path. If it ends at a node that
was computed meanwhile, the tree is cut to what follows that node: that is the next draft, and it needs no pass.

Ahead of the verdict, a pass computes the likeliest nodes of any depth. Levels that a draft lacks when the verdict comes
are computed then, if the batch gains by waiting for them. Drafts that need not wait are sent at once: their keys and
values are moved afterwards, by the first `advance`.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from engine.config import EngineConfig
from engine.drafting.best_first import BestFirstTree
from engine.drafting.cached_prefix import CachedPrefix
from engine.drafting.chain import Drawn
from engine.drafting.model import finish
from engine.drafting.nodes import TIP
from engine.drafting.run_ahead.foresight import NUM_CANDIDATES
from engine.drafting.run_ahead.pace import WIDTHS
from engine.drafting.run_ahead.passes import PassesAhead
from engine.drafting.tree import COMPUTED_PER_NODE, Growth, TreeDrafter
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch
from engine.protocols import NO_DRAFT, Draft, ProposeRow
from engine.sampling.grammar import Grammars

_MOST_COMPUTED = 128
"""Nodes of a tree that may be computed before the verdict on it is known."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What stays of a request's cache after a verdict, while its entries still lie where they were computed.

    Attributes:
        base: how many tokens were committed before the verdict.
        token_ids: those of the committed tokens after them whose entries stay.
        orders: as which nodes of the tree the entries were computed that follow `base` from now on.
    """

    prefix: CachedPrefix
    base: int
    token_ids: list[int]
    orders: list[int]


class _UnderWay(NamedTuple):
    """A pass that was launched ahead, and the trees that it grows."""

    growths: list[Growth[BestFirstTree]]
    drawn: Drawn


class RunAheadTreeDrafter(PassesAhead, TreeDrafter):
    """A TreeDrafter whose trees grow on in `advance`."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        *,
        token_limit: int | None = None,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make the draft's KV cache; `clock` (seconds, from any start) measures passes and rounds."""
        TreeDrafter.__init__(self, backend, config, token_limit=token_limit, grammars=grammars)
        PassesAhead.__init__(self, clock)
        self._num_children = NUM_CANDIDATES
        self._num_nodes = max(1, config.num_speculative_tokens)
        self._rows: dict[str, ProposeRow] = {}
        """The rows of the last proposal, with copies of the requests."""
        self._unsettled: dict[str, _Kept] = {}
        self._under_way: _UnderWay | None = None

    def release(self, request_id: str) -> None:
        """Free a request's blocks; the other trees go on growing."""
        self._unsettled.pop(request_id, None)
        if self._rows.pop(request_id, None) is not None and self._work is not None:
            self._work = self._grow_ahead()
        super().release(request_id)

    def stop(self) -> None:
        """Drop all trees."""
        self._rows, self._sent, self._unsettled = {}, {}, {}
        self._work = self._under_way = None

    def _propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        arrived = self._begin_proposal()
        self._take_results()
        self._work = None
        # The trees grow on after the answer, and by then the requests' owner may have appended tokens.
        before, self._rows = self._rows, {}
        for row in rows:
            self._rows[row.request.request_id] = replace(row, request=row.request.copy())
        drafted = [row for row in self._rows.values() if row.num_draft_tokens]
        self._num_nodes = max((row.num_draft_tokens for row in drafted), default=self._num_nodes)
        self._cut_trees(before, arrived)
        missing = [row for row in drafted if row.request.request_id not in self._sent]
        # Where no row has a draft, the time of a pass is measured anew: it may be less by now than it was.
        if missing and (len(missing) == len(drafted) or self._is_worth_waiting(len(missing))):
            self._plant_late(missing)
        while self._is_worth_waiting(self._gain()) and self._grow_late():
            pass
        drafts = self._drafts()
        self._work = self._grow_ahead()
        self._pace.observe_answer()
        return [drafts.get(row.request.request_id, NO_DRAFT) for row in rows]

    def _cut_trees(self, before: Mapping[str, ProposeRow], arrived: float) -> None:
        """Cut every tree to what follows the verdict on it; drop those of requests that are not in the proposal.

        Args:
            before: the rows of the last proposal.
        """
        sent, self._sent = self._sent, {}
        reasons: dict[str, str | None] = {}
        has_verdict = False
        for name, row in self._rows.items():
            reasons[name] = "stale"
            if name in before:
                has_verdict |= len(row.request.token_ids) > len(before[name].request.token_ids)
                reasons[name] = self._cut(row, *sent.pop(name)) if name in sent else "unprepared"
            if row.num_draft_tokens:
                self._count(reasons[name])
        for name in sent:
            self._trim(name, len(self._prefixes[name].token_ids))
        self._count_passes(is_used=None in reasons.values())
        if has_verdict:
            is_late = "unprepared" in reasons.values() or self._is_worth_waiting(self._gain())
            self._pace.observe_request(arrived, is_late=is_late)

    def _cut(self, row: ProposeRow, base: int, tree: BestFirstTree) -> str | None:
        """Cut a tree to what follows the committed tokens; return the reason if there is nothing."""
        request, name = row.request, row.request.request_id
        path = self._follow(request, base, tree)
        end, node = base + len(path), path[-1] if path else TIP
        kept = _Kept(self._prefixes[name], base, request.token_ids[base:end], [tree.order(step) for step in path])
        self._unsettled[name] = kept
        if node not in tree.options:
            return "unprepared"
        if end < len(request.token_ids):
            return "token" if tree.child(node, request.token_ids[end]) is None else "unprepared"
        tree.num_nodes = row.num_draft_tokens or self._num_nodes
        kept.orders.extend(tree.cut(node))
        self._sent[name] = end, tree
        return None

    @property
    def _is_settled(self) -> bool:
        return not self._unsettled

    @torch.inference_mode()
    def _settle(self) -> None:
        """Move the entries that stay after the last verdicts to their places, and free the blocks behind them."""
        unsettled, self._unsettled = self._unsettled, {}
        sources: list[int] = []
        targets: list[int] = []
        for kept in unsettled.values():
            moves = self._moves(kept.prefix, kept.base, kept.orders)
            sources += moves[0]
            targets += moves[1]
        if sources:
            self._kv.move(sources, targets)
        for name, kept in unsettled.items():
            kept.prefix.token_ids += kept.token_ids
            self._trim(name, kept.base + len(kept.orders))

    def _drafted(self) -> list[tuple[ProposeRow, BestFirstTree]]:
        """Return the rows that get a draft, and its tree."""
        limit = self.backend.info.max_model_len
        return [
            (row, self._sent[name][1])
            for name, row in self._rows.items()
            if row.num_draft_tokens and name in self._sent
            if len(row.request.token_ids) + row.num_draft_tokens <= limit
        ]

    def _gain(self) -> float:
        """Return how many more accepted tokens another level of all trees is expected to bring, at most."""
        return sum(tree.gain for _, tree in self._drafted())

    def _is_worth_waiting(self, gain: float) -> bool:
        """Decide whether the whole batch waits for a pass that is expected to bring `gain` more accepted tokens.

        It waits if that is expected to commit more tokens per second, by the times that were measured recently.
        """
        now = len(self._rows) + sum(tree.expected for _, tree in self._drafted())
        return gain > 0 and self._pace.slowdown(1) < 1 + gain / now

    def _plant_late(self, rows: Sequence[ProposeRow]) -> None:
        """Plant trees for rows without one, and compute what follows their tips; the target waits for it."""
        self._settle()
        self._plant_missing(rows)
        if growths := self._bare():
            self._compute_late(finish(self._reach_tips(growths)), growths)

    def _grow_late(self) -> bool:
        """Compute another level of all trees, for which the target waits; return whether there were places for it."""
        self._settle()
        growths = []
        for row, tree in self._drafted():
            num_places = max(tree.num_computed + tree.num_nodes, COMPUTED_PER_NODE * tree.num_nodes)
            self._reserve(row.request, tree, num_places)
            growths.append(Growth(row.request, tree, tree.next_level()))
        growths = [growth for growth in growths if growth.level]
        if growths:
            self._compute_late(self._batch(growths), growths)
        return bool(growths)

    def _compute_late(self, batch: ForwardBatch, growths: Sequence[Growth[BestFirstTree]]) -> None:
        started = self._clock()
        self._branch_out(batch, growths)
        self._pace.observe_late_steps(self._clock() - started, 1)

    def _drafts(self) -> dict[str, Draft]:
        return {row.request.request_id: tree.draft() for row, tree in self._drafted()}

    def _plant_missing(self, rows: Sequence[ProposeRow]) -> None:
        """Plant a tree for every row that has none, if there is room for it."""
        for row in rows:
            name, request = row.request.request_id, row.request
            if name not in self._sent and self._make_room(row, [], self._rows):
                self._sent[name] = len(request.token_ids), self._plant(request, row.num_draft_tokens or self._num_nodes)

    def _bare(self) -> list[Growth[BestFirstTree]]:
        """Return the trees of which not even the tip is computed."""
        trees = [(row.request, self._sent[name][1]) for name, row in self._rows.items() if name in self._sent]
        return [Growth(request, tree, [TIP]) for request, tree in trees if TIP not in tree.options]

    def _grow_ahead(self) -> Generator[None, None, None]:
        """Grow the trees of the last proposal, yielding after every forward pass."""
        self._take_results()
        self._plant_missing(list(self._rows.values()))
        if growths := self._bare():
            yield from self._compute_ahead((yield from self._reach_tips(growths)), growths)
        while growths := self._likeliest():
            yield from self._compute_ahead(self._batch(growths), growths)

    def _compute_ahead(self, batch: ForwardBatch, growths: list[Growth[BestFirstTree]]) -> Generator[None, None, None]:
        self._under_way = _UnderWay(growths, self._launch(batch, growths))
        yield
        self._take_results()

    def _likeliest(self) -> list[Growth[BestFirstTree]]:
        """Return what a pass computes ahead of the verdicts."""
        width = WIDTHS[self._pace.width]
        growths = []
        for name, row in self._rows.items():
            if name in self._sent:
                base, tree = self._sent[name]
                self._reserve(row.request, tree, min(tree.num_computed + width, _MOST_COMPUTED))
                # After the deepest verdict, the next draft has nodes of twice that depth that are worth computing.
                depth = min(2 * tree.num_nodes, self.backend.info.max_model_len - base)
                growths.append(Growth(row.request, tree, tree.likeliest(width, depth)))
        return [growth for growth in growths if growth.level]

    def _take_results(self) -> None:
        """Add what the pass that is under way, if any, has computed; wait for its end."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            self._add_children(*under_way)
