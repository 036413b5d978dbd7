"""SampledTreeDrafter: trees whose tokens are sampled, for rules that need to know from what.

Where siblings are drawn without replacement (the rejection rule), a sibling comes with the row that its earlier
siblings are missing from. Where they are independent (k-sequential selection), the tree is several chains from the tip;
equal beginnings are not merged, because the rule counts them.

The emitted law is the target's only if a tree's shape does not depend on the tokens it holds. So the shape is chosen
before the first token is drawn, by how often each sibling was accepted in earlier rounds; each node adds the product
of these rates up to it (Chen et al., "Sequoia", 2402.12374, Section 3.1), and the best n are taken.
"""

import heapq
import itertools
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.drafting.nodes import TIP, Tree
from engine.drafting.token_drawer import TOP_M
from engine.drafting.tree import AnyTreeDrafter, Growth
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch
from engine.protocols import Draft, Request
from engine.sampling import noise
from engine.sampling.grammar import Grammars
from engine.sampling.logits import Run, noised, shape
from engine.verification.rule import RULES

_PRIOR_RATES = (0.7, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01)
_PRIOR_ROUNDS = 20
_ROUNDS_REMEMBERED = 500


class SampledTree(Tree):
    """A tree of a given shape, whose tokens are filled in level by level."""

    def __init__(self, parents: Sequence[int], end_ids: Collection[int] = ()) -> None:
        """Make an empty tree.

        Args:
            parents: the shape, as in `Draft`.
            end_ids: tokens after which the text ends: nothing is drafted after them.
        """
        super().__init__(end_ids)
        self._shape: dict[int, list[int]] = {}
        for place, parent in enumerate(parents):
            self._shape.setdefault(parent, []).append(place)
        self._places: list[int] = []
        self._rows: list[tuple[list[int], list[float]]] = []
        self._newest = 0

    def lanes(self, node: int) -> list[int]:
        """Return the places in the shape of the children that a node or the tip is to have."""
        return self._shape.get(node if node == TIP else self._places[node], [])

    def add(self, parent: int, token_ids: Sequence[int], rows: Sequence[tuple[list[int], list[float]]]) -> None:
        """Add children of a node or of the tip, in the order in which they were drawn.

        Args:
            rows: the ids and probabilities that each was sampled from, given those before it.
        """
        for place, token, row in zip(self.lanes(parent), token_ids, rows, strict=False):
            self._append(parent, token)
            self._places.append(place)
            self._rows.append(row)

    def next_level(self) -> list[int]:
        """Return the nodes of the last level that are to have children."""
        level = [node for node in range(self._newest, len(self.nodes)) if self.lanes(node) and not self._ends(node)]
        self._newest = len(self.nodes)
        self._compute(level)
        return level

    def draft(self) -> Draft:
        """Return the tree in the order of its shape."""
        chosen = sorted(range(len(self.nodes)), key=lambda node: self._places[node])
        index = {TIP: TIP} | {node: i for i, node in enumerate(chosen)}
        return Draft(
            [self.nodes[node].token_id for node in chosen],
            [index[self.nodes[node].parent] for node in chosen],
            [self._rows[node][0] for node in chosen],
            [self._rows[node][1] for node in chosen],
        )


class SampledTreeDrafter(AnyTreeDrafter[SampledTree]):
    """Drafts trees by sampling, for rules that need draft rows."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        *,
        token_limit: int | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Make the draft's KV cache; see `ModelDrafter`."""
        super().__init__(backend, config, token_limit=token_limit, grammars=grammars)
        self._independent = RULES[config.verification].independent_siblings
        self._rates = {is_greedy: list(_PRIOR_RATES[: self._width]) for is_greedy in (False, True)}
        self._num_seen = {is_greedy: [_PRIOR_ROUNDS] * self._width for is_greedy in (False, True)}

    def _plant(self, request: Request, num_nodes: int) -> SampledTree:
        is_greedy = request.params.temperature == 0
        if self._independent:
            # Greedy chains would all be the same one.
            parents = chains(num_nodes, 1 if is_greedy else self._width)
        else:
            parents = likeliest_shape(num_nodes, self._rates[is_greedy])
        return SampledTree(parents, self._end_ids(request))

    def _branch_out(self, batch: ForwardBatch, growths: Sequence[Growth[SampledTree]]) -> None:
        output = self.backend.run(batch)
        runs = self._runs_of(growths)
        shaped = shape(self._in_target_ids(output.logits), runs)
        top, ids = shaped.topk(min(TOP_M, shaped.shape[-1]), -1)
        sparse = torch.full_like(shaped, float("-inf")).scatter_(-1, ids, top)
        drawn = self._independently(sparse, growths, runs) if self._independent else self._in_order(sparse, runs)
        rows = iter(zip(drawn, ids.tolist(), top.tolist(), strict=True))
        for request, tree, level in growths:
            for node in level:
                tokens, row_ids, logits = next(rows)
                tree.add(node, tokens, self._rows_of(request, tokens, row_ids, logits))

    def _in_order(self, sparse: Tensor, runs: Sequence[Run]) -> list[list[int]]:
        """Return tokens that are drawn from each row without replacement: the highest scores under Gumbel noise."""
        scores, tokens = noised(sparse, runs, noise.DRAFT_STREAM).topk(self._width, -1)
        self.backend.wait()
        return [
            [token for token, score in zip(*row, strict=True) if score > float("-inf")]
            for row in zip(tokens.tolist(), scores.tolist(), strict=True)
        ]

    def _independently(
        self, sparse: Tensor, growths: Sequence[Growth[SampledTree]], runs: Sequence[Run]
    ) -> list[list[int]]:
        """Return tokens that are drawn from each row independently, one for each chain that goes on there."""
        lanes = [growth.tree.lanes(node) for growth in growths for node in growth.level]
        repeated = [row for row, row_lanes in enumerate(lanes) for _ in row_lanes]
        per_run = iter(lanes)
        draws = []
        for run in runs:
            run_lanes = [lane % self._width for _ in run.depths for lane in next(per_run)]
            draws.append(Run(run.request, list(run.depths[:1]) * len(run_lanes), lanes=run_lanes))
        tokens = iter(noised(sparse[repeated], draws, noise.DRAFT_STREAM).argmax(-1).tolist())
        return [list(itertools.islice(tokens, len(row_lanes))) for row_lanes in lanes]

    def _rows_of(
        self, request: Request, tokens: Sequence[int], ids: list[int], logits: list[float]
    ) -> list[tuple[list[int], list[float]]]:
        """Return what each sibling was sampled from, given those before it; it sums to 1."""
        if request.params.temperature == 0:
            return [(ids, [float(other == token) for other in ids]) for token in tokens]
        if self._independent:
            return [(ids, _softmax(logits))] * len(tokens)
        rows = []
        for token in tokens:
            # From logits: at a low temperature, what the first token leaves is no longer a number as a probability.
            rows.append((ids, _softmax(logits)))
            logits = [-math.inf if other == token else logit for other, logit in zip(ids, logits, strict=True)]
        return rows

    def _learn(self, request: Request, tree: SampledTree, node: int, token: int) -> None:
        """Learn how often each sibling is the accepted one; a rejected one cannot be the recovered token."""
        is_greedy = request.params.temperature == 0
        rates, seen = self._rates[is_greedy], self._num_seen[is_greedy]
        siblings = [other.token_id for other in tree.nodes if other.parent == node]
        for rank, sibling in enumerate(siblings[: self._width]):
            seen[rank] = min(seen[rank] + 1, _ROUNDS_REMEMBERED)
            rates[rank] += ((sibling == token) - rates[rank]) / seen[rank]


def _softmax(logits: Sequence[float]) -> list[float]:
    """Return the probabilities of tokens with these logits, of which one is finite."""
    highest = max(logits)
    weights = [math.exp(logit - highest) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def likeliest_shape(num_nodes: int, rates: Sequence[float]) -> list[int]:
    """Return the parents of the tree of `num_nodes` nodes with the most accepted tokens in expectation.

    Args:
        rates: how often the first, second, ... child of an accepted node is accepted.
    """
    rates = list(itertools.accumulate(rates, min))  # a later sibling never comes without the earlier ones
    parents: list[int] = []
    # Entries: minus the probability of a node, its place among equals, its parent, its rank, and its parent's.
    heap = [(-rates[0], 0, TIP, 0, 1.0)]
    for place in itertools.count(1):
        if len(parents) == num_nodes or not heap:
            return parents
        negative, _, parent, rank, reached = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        heapq.heappush(heap, (negative * rates[0], 2 * place, node, 0, -negative))
        if rank + 1 < len(rates):
            heapq.heappush(heap, (-reached * rates[rank + 1], 2 * place + 1, parent, rank + 1, reached))
    raise AssertionError("unreachable")


def chains(num_nodes: int, count: int) -> list[int]:
    """Return the parents of `count` chains from the tip, as long as `num_nodes` allow."""
    return [node - count if node >= count else TIP for node in range(num_nodes)]
