"""TreeDrafter: drafts the nodes that are most likely to be accepted, for rules that share noise.

Under the coupled rule, the children of a node are the tokens with the highest scores under the target's noise, so the
target's token is among them as often as possible.

A tree's expected number of accepted tokens is the sum, over its nodes, of the probability that the node and all before
it are accepted (Chen et al., "Sequoia", 2402.12374, Section 3.1). A child's probability never exceeds its parent's, so
the best tree of n nodes has the n best candidates. EAGLE-2 (2406.16858) grows trees by the draft's probabilities. Here
probabilities come from the shared scores and how reliable scores were in earlier rounds.
"""

import itertools
from collections.abc import Collection, Sequence

from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.next_tokens import Confidence, NextTokens
from engine.drafting.model.token_drawer import Drawn
from engine.drafting.trees.levelwise import TIP, LevelwiseDrafter, Tree, TreeLevel
from engine.execution.batch import ForwardBatch
from engine.protocols import Draft, Request

COMPUTED_PER_NODE = 4
"""Nodes that may be computed per node of a draft."""
_LEAST_COMPUTED = 4
_LEAST_PROBABILITY = 0.01
"""Less likely nodes are not computed ahead of the verdict."""


class BestFirstTree(Tree):
    """The candidates of one request; the best `num_nodes` are its draft, at most `width` after the same node.

    Other nodes may be computed ahead of the verdict, because any token may follow the last accepted token.
    """

    def __init__(self, base: int, num_nodes: int, width: int, end_ids: Collection[int] = ()) -> None:
        super().__init__(base, end_ids)
        self.next_tokens: dict[int, NextTokens] = {}
        """The likeliest tokens after each computed node."""
        self.num_nodes = num_nodes
        self.max_computed = 0
        """How many nodes can be computed, including nodes that turn out not to be in the draft."""
        self._width = width
        self._probs = [1.0]
        self._ranks = [0]
        """Per node, its index among its parent's children."""
        self._may_be_drafted = [True]
        self._ranking: list[int] | None = None
        self._newest = 0

    def add(self, parent: int, next_tokens: NextTokens, probs: Sequence[float]) -> None:
        """Add the likeliest children of a node; `probs` assume that the parent is accepted."""
        self.next_tokens[parent] = next_tokens
        reached = self._probs[parent]
        for rank, (token, prob) in enumerate(zip(next_tokens.token_ids, probs, strict=False)):
            if rank >= self._width and reached * prob < _LEAST_PROBABILITY:
                break
            self._add_child(parent, token, reached * prob, rank)
        self._ranking = None

    def next_level(self) -> list[int]:
        """Return the last level's nodes whose children may become part of the draft.

        A level has only the likeliest, at most a quarter of the draft's nodes (or 4), so that deep levels get some.
        The first level of a tree that was cut may have nodes of several depths.
        """
        level = [node for node, _ in self._promising()][: self._num_free]
        self._newest = len(self.nodes)
        self._compute(level)
        return level

    @property
    def gain(self) -> float:
        """Upper bound of the expected accepted tokens that the next level adds."""
        return sum(gain for _, gain in self._promising())

    @property
    def expected(self) -> float:
        return sum(self._probs[node] for node in self._best())

    def likeliest(self, count: int, max_depth: int) -> list[int]:
        """Return the likeliest nodes to compute ahead of the verdict, of any depth up to `max_depth`."""
        likely = itertools.takewhile(lambda node: self._probs[node] >= _LEAST_PROBABILITY, self._ranked())
        possible = (node for node in likely if self._can_grow(node) and len(self.nodes[node].path) <= max_depth)
        level = list(itertools.islice(possible, min(count, self._num_free)))
        self._compute(level)
        return level

    def cut(self, root: int) -> list[int]:
        """Keep only the subtree after a computed node; return its computed nodes' old computation indices."""
        index = {root: TIP}
        for node, state in enumerate(self.nodes):
            if state.parent in index:
                index[node] = len(index)
        kept = [node for node in index if node != root]
        computed = [node for node in kept if self.nodes[node].compute_index is not None]
        indices = [self.compute_index(node) for node in computed]
        nodes, probs, ranks = self.nodes, self._probs, self._ranks
        self.nodes, self._children, self._probs, self._ranks, self._may_be_drafted = nodes[:1], {}, [1.0], [0], [True]
        for node in kept:
            self._add_child(index[nodes[node].parent], nodes[node].token_id, probs[node] / probs[root], ranks[node])
        self.next_tokens = {index[node]: tokens for node, tokens in self.next_tokens.items() if node in index}
        self.num_computed, self.max_computed = 0, len(computed)
        self._compute([index[node] for node in computed])
        self._newest, self._ranking = 0, None
        return indices

    def draft(self) -> Draft:
        """Return the best candidates, best first, so that the first n are the best tree of n nodes."""
        return self._draft_of(self._best())

    def _best(self) -> list[int]:
        drafted = (node for node in self._ranked() if self._may_be_drafted[node])
        return list(itertools.islice(drafted, self.num_nodes))

    def _add_child(self, parent: int, token: int, prob: float, rank: int) -> None:
        self._append(parent, token)
        self._probs.append(prob)
        self._ranks.append(rank)
        self._may_be_drafted.append(rank < self._width and self._may_be_drafted[parent])

    def _ranked(self) -> list[int]:
        if self._ranking is None:
            self._ranking = sorted(range(1, len(self.nodes)), key=self._probs.__getitem__, reverse=True)
        return self._ranking

    def _can_grow(self, node: int) -> bool:
        return self.nodes[node].compute_index is None and not self._ends(node)

    @property
    def _num_free(self) -> int:
        return max(self.max_computed - self.num_computed, 0)

    def _promising(self) -> list[tuple[int, float]]:
        best = self._best()
        least = self._probs[best[-1]] if len(best) == self.num_nodes else 0.0
        newest = (node for node in best if node >= self._newest and self._can_grow(node))
        gains = ((node, self._probs[node] - least) for node in newest)
        return [(node, gain) for node, gain in gains if gain > 0][: max(self.num_nodes // 4, _LEAST_COMPUTED)]


class TreeDrafter(LevelwiseDrafter[BestFirstTree]):
    """Drafts the likeliest nodes by the scores that draft and target share."""

    def __init__(self, draft: DraftModel, config: EngineConfig, *, num_children: int | None = None) -> None:
        """`num_children` are added per node, by default as many as a draft may hold."""
        super().__init__(draft, config)
        self._confidence = Confidence()
        self._num_children = num_children or self.width

    def plant(self, request: Request, num_nodes: int) -> BestFirstTree:
        tree = BestFirstTree(len(request.token_ids), num_nodes, self.width, self._drawer.end_ids(request))
        # Many nodes turn out not to be among the best after they were computed.
        self.reserve(request, tree, COMPUTED_PER_NODE * num_nodes)
        return tree

    def reserve(self, request: Request, tree: BestFirstTree, num_nodes: int) -> None:
        """Reserve blocks to compute up to `num_nodes` nodes of a tree, or as many as fit."""
        prefix = self.cache.prefixes[request.request_id]
        self.cache.reserve(prefix, tree.base + num_nodes)
        tree.max_computed = min(num_nodes, len(prefix.block_ids) * self.cache.kv.block_size - tree.base)

    def compute(self, batch: ForwardBatch, levels: Sequence[TreeLevel[BestFirstTree]]) -> None:
        self.add_children(levels, self.launch(batch, levels))

    def launch(self, batch: ForwardBatch, levels: Sequence[TreeLevel[BestFirstTree]]) -> Drawn:
        requests, depths = [level.request for level in levels], [level.depths for level in levels]
        return self._drawer.step(batch, requests, depths, lambda: [level.paths for level in levels])

    def add_children(self, levels: Sequence[TreeLevel[BestFirstTree]], drawn: Drawn) -> None:
        """Wait for a launched pass, and add the children of the level that it computed."""
        self._backend.wait()
        assert drawn.ranking is not None
        computed = [(level, node) for level in levels for node in level.nodes]
        for (level, node), next_tokens in zip(computed, drawn.ranking.next_tokens(), strict=True):
            weights = self._confidence.weights(level.request, next_tokens.scores)
            total = sum(weights)
            level.tree.add(node, next_tokens, [weight / total for weight in weights[: self._num_children]])

    def learn(self, request: Request, tree: BestFirstTree, node: int, token: int) -> None:
        if (next_tokens := tree.next_tokens.get(node)) is not None:
            self._confidence.learn(request, next_tokens, token)
