"""SampledTreeDrafter: trees of sampled tokens, each with its distribution, for rules that need draft rows.

The rejection rule draws siblings without replacement, so a sibling's row lacks the earlier siblings. For k-sequential
selection the tree is several independent chains from the tip. Equal beginnings are not merged, because the rule counts
them.

The emitted law is the target's only if a tree's shape does not depend on its tokens. So the shape is chosen before the
first draw, by earlier acceptance rates of siblings: it has the n nodes with the highest products of rates along their
paths (Chen et al., "Sequoia", 2402.12374, Section 3.1).
"""

import heapq
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor

from engine.config import EngineConfig
from engine.control.acceptance import Acceptance
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.token_drawer import likeliest
from engine.drafting.trees.levelwise import LevelwiseDrafter, Tree, TreeLevel
from engine.execution.batch import ForwardBatch
from engine.protocols import Draft, Request
from engine.sampling import noise
from engine.sampling.logits import Run, draw, noised, shape
from engine.verification.rule import rule_of

_PRIOR_RATES = (0.7, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01)


class SampledTree(Tree):
    """A tree of a given shape, whose tokens are filled in level by level."""

    def __init__(self, base: int, parents: Sequence[int], end_ids: Collection[int] = ()) -> None:
        """`parents` are the shape, as in `Draft`."""
        super().__init__(base, end_ids)
        self._shape: dict[int, list[int]] = {}
        for position, parent in enumerate(parents):
            self._shape.setdefault(parent, []).append(position)
        self._positions = [-1]
        """Per node, its index in the shape."""
        self._rows: list[tuple[list[int], list[float]]] = [([], [])]
        self._newest = 1

    def children_in_shape(self, node: int) -> list[int]:
        return self._shape.get(self._positions[node], [])

    def add(self, parent: int, token_ids: Sequence[int], rows: Sequence[tuple[list[int], list[float]]]) -> None:
        """Add children in the order of drawing, each with its distribution given its earlier siblings."""
        for position, token, row in zip(self.children_in_shape(parent), token_ids, rows, strict=False):
            self._append(parent, token)
            self._positions.append(position)
            self._rows.append(row)

    def next_level(self) -> list[int]:
        """Return the nodes of the last level that have children in the shape."""
        newest = range(self._newest, len(self.nodes))
        level = [node for node in newest if self.children_in_shape(node) and not self._ends(node)]
        self._newest = len(self.nodes)
        self._compute(level)
        return level

    def draft(self) -> Draft:
        order = sorted(range(1, len(self.nodes)), key=self._positions.__getitem__)
        rows = [self._rows[node] for node in order]
        return replace(self._draft_of(order), top_ids=[ids for ids, _ in rows], top_probs=[probs for _, probs in rows])


class SampledTreeDrafter(LevelwiseDrafter[SampledTree]):
    """Drafts trees by sampling, for rules that need draft rows."""

    def __init__(self, draft: DraftModel, config: EngineConfig) -> None:
        super().__init__(draft, config)
        self._independent = rule_of(config.verification).independent_siblings
        self._acceptance = {is_greedy: Acceptance(_PRIOR_RATES[: self.width]) for is_greedy in (False, True)}

    def plant(self, request: Request, num_nodes: int) -> SampledTree:
        is_greedy = request.params.temperature == 0
        if self._independent:
            # Greedy chains would all be equal.
            parents = chains(num_nodes, 1 if is_greedy else self.width)
        else:
            parents = likeliest_shape(num_nodes, list(map(self._acceptance[is_greedy].rate, range(self.width))))
        return SampledTree(len(request.token_ids), parents, self._drawer.end_ids(request))

    def compute(self, batch: ForwardBatch, levels: Sequence[TreeLevel[SampledTree]]) -> None:
        output = self._backend.run(batch)
        requests, depths = [level.request for level in levels], [level.depths for level in levels]
        runs = self._drawer.runs(requests, depths, lambda: [level.paths for level in levels])
        shaped = shape(self._drawer.in_target_ids(output.logits), runs)
        ids, top, sparse = likeliest(shaped)
        drawn = self._independently(sparse, levels, runs) if self._independent else self._in_order(sparse, runs)
        computed = [(level, node) for level in levels for node in level.nodes]
        for (level, node), tokens, row_ids, logits in zip(computed, drawn, ids.tolist(), top.tolist(), strict=True):
            level.tree.add(node, tokens, self._rows_of(level.request, tokens, row_ids, logits))

    def _in_order(self, sparse: Tensor, runs: Sequence[Run]) -> list[list[int]]:
        """Draw from each row without replacement: the highest scores with Gumbel noise."""
        scores, tokens = noised(sparse, runs, noise.DRAFT_STREAM).topk(self.width, -1)
        self._backend.wait()
        return [
            [token for token, score in zip(*row, strict=True) if score > float("-inf")]
            for row in zip(tokens.tolist(), scores.tolist(), strict=True)
        ]

    def _independently(
        self, sparse: Tensor, levels: Sequence[TreeLevel[SampledTree]], runs: Sequence[Run]
    ) -> list[list[int]]:
        """Draw from each row independently, a token per chain through it."""
        children = [level.tree.children_in_shape(node) for level in levels for node in level.nodes]
        repeated = [row for row, positions in enumerate(children) for _ in positions]
        row_children = iter(children)
        draws = []
        for run in runs:
            seed, tip = run.params.seed or 0, len(run.request.token_ids)
            chain_indices = [position % self.width for _ in run.depths for position in next(row_children)]
            seeds = [noise.round_seed(seed, tip, chain) for chain in chain_indices]
            draws.append(Run(run.request, list(run.depths[:1]) * len(seeds), seeds=seeds))
        tokens = iter(draw(sparse[repeated], draws, noise.DRAFT_STREAM).tolist())
        return [list(itertools.islice(tokens, len(positions))) for positions in children]

    def _rows_of(
        self, request: Request, tokens: Sequence[int], ids: list[int], logits: list[float]
    ) -> list[tuple[list[int], list[float]]]:
        """Return the distribution of each sibling, given its earlier siblings."""
        if request.params.temperature == 0:
            return [(ids, [float(row_id == token) for row_id in ids]) for token in tokens]
        rows = []
        for token in tokens:
            rows.append((ids, _softmax(logits)))
            if not self._independent:  # logits, because at a low temperature all probabilities but the first underflow
                logits = [-math.inf if row_id == token else logit for row_id, logit in zip(ids, logits, strict=True)]
        return rows

    def learn(self, request: Request, tree: SampledTree, node: int, token: int) -> None:
        """Learn how often each sibling is accepted; a rejected sibling cannot be the recovered token."""
        acceptance = self._acceptance[request.params.temperature == 0]
        siblings = [child.token_id for child in tree.nodes if child.parent == node]
        for rank, sibling in enumerate(siblings[: self.width]):
            acceptance.observe(rank, accepted=sibling == token)


def _softmax(logits: Sequence[float]) -> list[float]:
    highest = max(logits)
    weights = [math.exp(logit - highest) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def likeliest_shape(num_nodes: int, rates: Sequence[float]) -> list[int]:
    """Return the parents of the tree with the most expected accepted tokens; `rates`: [siblings]."""
    rates = list(itertools.accumulate(rates, min))  # a later sibling never comes without the earlier siblings
    parents: list[int] = []
    # Entries: minus a node's probability, a tie-breaker, its parent, its rank, and its parent's probability.
    heap = [(-rates[0], 0, -1, 0, 1.0)]
    for node in range(num_nodes):
        negative, _, parent, rank, reached = heapq.heappop(heap)
        parents.append(parent)
        heapq.heappush(heap, (negative * rates[0], 2 * node + 1, node, 0, -negative))
        if rank + 1 < len(rates):
            heapq.heappush(heap, (-reached * rates[rank + 1], 2 * node + 2, parent, rank + 1, reached))
    return parents


def chains(num_nodes: int, count: int) -> list[int]:
    """Return the parents of `count` chains from the tip, with `num_nodes` nodes in all."""
    return [max(-1, node - count) for node in range(num_nodes)]
