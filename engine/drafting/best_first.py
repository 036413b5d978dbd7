"""BestFirstTree: one request's draft tree, grown to the nodes that are likeliest to be accepted.

The expected number of accepted tokens of a tree is the sum, over its nodes, of the probability that the node and all
before it are accepted (Chen et al., "Sequoia", 2402.12374, Section 3.1). A child's probability is never larger than its
parent's, so the best tree of n nodes has the n best candidates, whatever its shape: a chain where the draft is sure,
siblings where it is not. EAGLE-2 (2406.16858) grows trees alike, with the draft's probabilities; here they come from
the scores that draft and target share.

Where draft and target share their noise, the target follows one path through the tree of all candidates. So a tree that
was sent may grow on, and when it is known how far the target went, what follows there is a tree for the next draft.
"""

import itertools
from collections.abc import Collection, Sequence

from engine.drafting.nodes import TIP, Tree
from engine.drafting.run_ahead.verdicts import Options
from engine.protocols import Draft

_LEAST_COMPUTED = 4
_LEAST_PROBABILITY = 0.01
"""A node that is less likely to be accepted is not computed ahead of the verdict."""


class BestFirstTree(Tree):
    """The candidates of one request, of which the best are its draft.

    Attributes:
        options: per computed node, and for the tip, the likeliest tokens after it.
        num_nodes: of the draft, at most.
        num_places: how many nodes can be computed; those of the draft, and some that turn out not to be of it.
    """

    def __init__(
        self, num_nodes: int, num_places: int = 0, end_ids: Collection[int] = (), width: int | None = None
    ) -> None:
        """Make an empty tree.

        Args:
            end_ids: tokens after which the text ends: nothing is drafted after them.
            width: how many children of a node a draft may hold. Others may be computed ahead of the verdict, because
                the token after the last accepted one may be any. None for no limit.
        """
        super().__init__(end_ids)
        self.options: dict[int, Options] = {}
        self.num_nodes = num_nodes
        self.num_places = num_places
        self._width = width
        self._probs: list[float] = []
        self._places: list[int] = []
        """Per node, as which of its parent's children it was added."""
        self._may_be_drafted: list[bool] = []
        self._ranking: list[int] | None = None
        self._newest = 0

    def add(self, parent: int, options: Options, probs: Sequence[float]) -> None:
        """Add the children of a node or of the tip, the likeliest first.

        Args:
            probs: the probability of each child if its parent is accepted; `options` may have more tokens.
        """
        self.options[parent] = options
        reached = 1.0 if parent == TIP else self._probs[parent]
        for place, (token, prob) in enumerate(zip(options.token_ids, probs, strict=False)):
            if not self._is_within(place) and reached * prob < _LEAST_PROBABILITY:
                break
            self._add_child(parent, token, reached * prob, place)
        self._ranking = None

    def next_level(self) -> list[int]:
        """Return the nodes to compute next: those of the last level whose children may become part of the draft.

        At most a quarter of the draft's nodes (and 4 where that is less) are computed at each level, the likeliest.
        Otherwise unlikely siblings of the first levels would use up the places of a tree that is deep. The first level
        of a tree that was cut may have nodes of several depths.
        """
        level = [node for node, _ in self._promising()][: self._num_free]
        self._newest = len(self.nodes)
        self._compute(level)
        return level

    @property
    def gain(self) -> float:
        """By how many accepted tokens the next level is expected to improve the draft, at most."""
        return sum(gain for _, gain in self._promising())

    @property
    def expected(self) -> float:
        """How many tokens of the draft are expected to be accepted."""
        return sum(self._probs[node] for node in self._best())

    def likeliest(self, count: int, max_depth: int) -> list[int]:
        """Return the nodes to compute ahead of the verdict: the likeliest, of any depth up to `max_depth`."""
        likely = itertools.takewhile(lambda node: self._probs[node] >= _LEAST_PROBABILITY, self._ranked())
        possible = (node for node in likely if self._can_grow(node) and self.nodes[node].depth <= max_depth)
        level = list(itertools.islice(possible, min(count, self._num_free)))
        self._compute(level)
        return level

    def cut(self, root: int) -> list[int]:
        """Make a computed node the tip: only what follows it stays. There are no free places then.

        Returns:
            Per node that stays and is computed, as which of all nodes before it was computed, in that order.
        """
        reached = 1.0 if root == TIP else self._probs[root]
        index = {root: TIP}
        for node, state in enumerate(self.nodes):
            if state.parent in index:
                index[node] = len(index) - 1
        kept = [node for node in index if node != root]
        computed = sorted((node for node in kept if self.nodes[node].order is not None), key=self.order)
        orders = [self.order(node) for node in computed]
        nodes, probs, places = self.nodes, self._probs, self._places
        self.nodes, self._children, self._probs, self._places, self._may_be_drafted = [], {}, [], [], []
        for node in kept:
            self._add_child(index[nodes[node].parent], nodes[node].token_id, probs[node] / reached, places[node])
        self.options = {index[node]: options for node, options in self.options.items() if node in index}
        self.num_computed, self.num_places = 0, len(computed)
        self._compute([index[node] for node in computed])
        self._newest, self._ranking = 0, None
        return orders

    def draft(self) -> Draft:
        """Return the best candidates as a draft, the best first, so that its first nodes are the best smaller tree."""
        chosen = self._best()
        index = {TIP: TIP} | {node: i for i, node in enumerate(chosen)}
        return Draft(
            [self.nodes[node].token_id for node in chosen], [index[self.nodes[node].parent] for node in chosen]
        )

    def _best(self) -> list[int]:
        """Return the best candidates, the best first: of two that are as good, the one that was added first.

        So a parent comes before its children, and is among them.
        """
        drafted = (node for node in self._ranked() if self._may_be_drafted[node])
        return list(itertools.islice(drafted, self.num_nodes))

    def _add_child(self, parent: int, token: int, prob: float, place: int) -> None:
        self._append(parent, token)
        self._probs.append(prob)
        self._places.append(place)
        self._may_be_drafted.append(self._is_within(place) and (parent == TIP or self._may_be_drafted[parent]))

    def _is_within(self, place: int) -> bool:
        return self._width is None or place < self._width

    def _ranked(self) -> list[int]:
        if self._ranking is None:
            self._ranking = sorted(range(len(self.nodes)), key=self._probs.__getitem__, reverse=True)
        return self._ranking

    def _can_grow(self, node: int) -> bool:
        return self.nodes[node].order is None and not self._ends(node)

    @property
    def _num_free(self) -> int:
        return max(self.num_places - self.num_computed, 0)

    def _promising(self) -> list[tuple[int, float]]:
        """Return the nodes of the last level whose children may become part of the draft, and what that may gain."""
        best = self._best()
        least = self._probs[best[-1]] if len(best) == self.num_nodes else 0.0
        newest = (node for node in best if node >= self._newest and self._can_grow(node))
        gains = ((node, self._probs[node] - least) for node in newest)
        return [(node, gain) for node, gain in gains if gain > 0][: max(self.num_nodes // 4, _LEAST_COMPUTED)]
