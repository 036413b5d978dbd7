"""RunAheadTreeDrafter: keeps growing the tree that it has sent while the target verifies it.

If the verdict ends at a node that was computed meanwhile, the subtree after that node is the next draft, without a
pass. Complete drafts are sent at once, and `settle` then moves their keys and values. Missing levels are computed
when the verdict comes, if the batch gains by waiting for them.
"""

import functools
import math
import time
from collections.abc import Callable, Container, Sequence

from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.next_tokens import NUM_CANDIDATES
from engine.drafting.run_ahead.passes import WIDTHS, PassesAhead, Work
from engine.drafting.trees.levelwise import TIP, Kept, TreeLevel
from engine.drafting.trees.tree_drafter import COMPUTED_PER_NODE, BestFirstTree, TreeDrafter
from engine.execution.batch import ForwardBatch
from engine.protocols import NO_DRAFT, Draft, ProposeRow, run_in_process

_MOST_COMPUTED = 128
"""Nodes of a tree that may be computed before its verdict."""


class RunAheadTreeDrafter(PassesAhead):
    """Drafts trees that grow on between proposals."""

    def __init__(
        self, draft: DraftModel, config: EngineConfig, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(draft.backend, clock)
        self._grower = TreeDrafter(draft, config, num_children=NUM_CANDIDATES)
        self.cache = self._grower.cache
        self._num_nodes = max(1, config.num_speculative_tokens)
        self._rows: dict[str, ProposeRow] = {}
        self._trees: dict[str, BestFirstTree] = {}
        self._kept: dict[str, Kept] = {}
        self._under_way: Callable[[], None] | None = None
        """Adds the results of the launched pass."""

    def release(self, request_id: str) -> None:
        """Free a request's blocks; the other trees keep growing."""
        self._kept.pop(request_id, None)
        self._trees.pop(request_id, None)
        if self._rows.pop(request_id, None) is not None and self._work is not None:
            self._work = self._grow_ahead()
        self._grower.release(request_id)

    def stop(self) -> None:
        self._rows, self._trees, self._kept = {}, {}, {}
        self._work = self._under_way = self._unsettled = None

    def _propose(self, rows: list[ProposeRow], arrived: float) -> list[Draft]:
        self._take_results()
        self._work = None
        before = {name: len(row.request.token_ids) for name, row in self._rows.items()}
        self._rows = {row.request.request_id: row for row in rows}
        drafted = [row for row in rows if row.num_draft_tokens]
        self._num_nodes = max((row.num_draft_tokens for row in drafted), default=self._num_nodes)
        reasons = self._cut_trees(before)
        is_late = self._is_worth_waiting(self._gain())
        if any(len(row.request.token_ids) > before.get(row.request.request_id, math.inf) for row in rows):
            self._pace.observe_request(arrived, is_late=is_late or "unprepared" in reasons)
        missing = [row for row in drafted if row.request.request_id not in self._trees]
        # If no row has a draft, the pass runs anyway, so that its time is measured again.
        if missing and (len(missing) == len(drafted) or self._is_worth_waiting(len(missing))):
            self._plant_late(missing)
            is_late = self._is_worth_waiting(self._gain())
        while is_late and self._grow_late():
            is_late = self._is_worth_waiting(self._gain())
        drafts = {row.request.request_id: tree.draft() for row, tree in self._drafted()}
        self._work = self._grow_ahead()
        return [drafts.get(row.request.request_id, NO_DRAFT) for row in rows]

    def _cut_trees(self, before: Container[str]) -> set[str | None]:
        """Cut trees to the subtrees after their verdicts; return the misses' reasons, and None for hits."""
        trees, self._trees = self._trees, {}
        reasons: set[str | None] = set()
        for name, row in self._rows.items():
            reason: str | None = "unprepared" if name in before else "stale"
            if (tree := trees.pop(name, None)) is not None and self._grower.tree_of(name) is tree:
                reason = self._cut(row, tree)
            if row.num_draft_tokens:
                self._count(reason)
            reasons.add(reason)
        for name in trees:
            self.cache.trim(name)
        if self._kept:
            self._unsettled = self._move_kept
        self._count_passes(is_used=None in reasons)
        return reasons

    def _cut(self, row: ProposeRow, tree: BestFirstTree) -> str | None:
        """Cut a tree to the subtree after the committed tokens, or return why there is none."""
        token_ids = row.request.token_ids
        node, kept = self._grower.follow(row.request, tree)
        self._kept[row.request.request_id] = kept
        end = tree.base + len(kept.token_ids)
        if node not in tree.next_tokens:
            return "unprepared"
        if end < len(token_ids):
            return "token" if tree.child(node, token_ids[end]) is None else "unprepared"
        tree.base, tree.num_nodes = end, row.num_draft_tokens or self._num_nodes
        kept.compute_indices.extend(tree.cut(node))
        self._trees[row.request.request_id] = tree
        return None

    def _move_kept(self) -> None:
        kept, self._kept = self._kept, {}
        self._grower.keep(kept.values())
        for name, entries in kept.items():
            self.cache.trim(name, entries.base + len(entries.compute_indices))
            entries.prefix.scratch = self._trees.get(name)

    def _drafted(self) -> list[tuple[ProposeRow, BestFirstTree]]:
        limit = self._backend.info.max_model_len
        rows = [(self._rows[name], tree) for name, tree in self._trees.items()]
        return [(row, tree) for row, tree in rows if 0 < row.num_draft_tokens <= limit - tree.base]

    def _gain(self) -> float:
        return sum(tree.gain for _, tree in self._drafted())

    def _is_worth_waiting(self, gain: float) -> bool:
        """Return whether waiting for a pass that adds `gain` tokens commits more tokens per second."""
        now = len(self._rows) + sum(tree.expected for _, tree in self._drafted())
        return gain > 0 and self._pace.slowdown(1) < 1 + gain / now

    def _plant_late(self, rows: Sequence[ProposeRow]) -> None:
        self.settle()
        self._plant_missing(rows)
        if levels := self._uncomputed():
            batch = run_in_process(self.cache.catch_up([level.request for level in levels]))
            self._compute_late(batch, levels)
            self.cache.hold([level.request for level in levels])

    def _grow_late(self) -> bool:
        """Compute another level of all trees; return whether there was room for it."""
        self.settle()
        levels = []
        for row, tree in self._drafted():
            max_computed = max(tree.num_computed + tree.num_nodes, COMPUTED_PER_NODE * tree.num_nodes)
            self._grower.reserve(row.request, tree, max_computed)
            levels.append(TreeLevel(row.request, tree, tree.next_level()))
        levels = [level for level in levels if level.nodes]
        if levels:
            self._compute_late(self._grower.batch(levels), levels)
        return bool(levels)

    def _compute_late(self, batch: ForwardBatch, levels: Sequence[TreeLevel[BestFirstTree]]) -> None:
        started = self.clock()
        self._grower.compute(batch, levels)
        self._pace.observe_late_steps(self.clock() - started, 1)

    def _plant_missing(self, rows: Sequence[ProposeRow]) -> None:
        for row in rows:
            name = row.request.request_id
            if name not in self._trees and self.cache.make_room(row, [], self._rows):
                tree = self._grower.plant(row.request, row.num_draft_tokens or self._num_nodes)
                self._trees[name] = self.cache.prefixes[name].scratch = tree

    def _uncomputed(self) -> list[TreeLevel[BestFirstTree]]:
        return [
            TreeLevel(self._rows[name].request, tree, [TIP])
            for name, tree in self._trees.items()
            if TIP not in tree.next_tokens
        ]

    def _grow_ahead(self) -> Work:
        self._take_results()
        self._plant_missing(list(self._rows.values()))
        if levels := self._uncomputed():
            batch = yield from self.cache.catch_up([level.request for level in levels])
            yield from self._compute_ahead(batch, levels)
        while levels := self._likeliest():
            yield from self._compute_ahead(self._grower.batch(levels), levels)

    def _compute_ahead(self, batch: ForwardBatch, levels: list[TreeLevel[BestFirstTree]]) -> Work:
        self._under_way = functools.partial(self._grower.add_children, levels, self._grower.launch(batch, levels))
        self.cache.hold([level.request for level in levels])
        yield None
        self._take_results()

    def _likeliest(self) -> list[TreeLevel[BestFirstTree]]:
        width = WIDTHS[self._pace.width]
        levels = []
        for name, tree in self._trees.items():
            request = self._rows[name].request
            self._grower.reserve(request, tree, min(tree.num_computed + width, _MOST_COMPUTED))
            # The next draft's nodes may follow the deepest verdict, so nodes of twice that depth are useful.
            depth = min(2 * tree.num_nodes, self._backend.info.max_model_len - tree.base)
            levels.append(TreeLevel(request, tree, tree.likeliest(width, depth)))
        return [level for level in levels if level.nodes]

    def _take_results(self) -> None:
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way()
