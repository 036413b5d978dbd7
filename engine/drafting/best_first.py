"""BestFirstTree: one request's draft tree, grown level by level to the nodes that are likeliest to be accepted.

The expected number of accepted tokens of a tree is the sum, over its nodes, of the probability that the node and all
before it are accepted (Chen et al., "Sequoia", 2402.12374, Section 3.1). A child's probability is never larger than its
parent's, so the best tree of n nodes has the n best candidates, whatever its shape: a chain where the draft is sure,
siblings where it is not. EAGLE-2 (2406.16858) grows trees alike, with the draft's probabilities; here they come from
the scores that draft and target share.
"""

from collections.abc import Collection, Sequence

from engine.drafting.nodes import TIP, Tree
from engine.drafting.run_ahead.verdicts import Options
from engine.protocols import Draft

_LEAST_COMPUTED = 4


class BestFirstTree(Tree):
    """The candidates of one request, of which the best are its draft.

    Attributes:
        options: per computed node, and for the tip, the likeliest tokens after it.
    """

    def __init__(self, num_nodes: int, num_places: int, end_ids: Collection[int] = ()) -> None:
        """Make an empty tree.

        Args:
            num_nodes: of the draft, at most.
            num_places: how many nodes can be computed; those of the draft, and some that turn out not to be of it.
            end_ids: tokens after which the text ends: nothing is drafted after them.
        """
        super().__init__(end_ids)
        self.options: dict[int, Options] = {}
        self._num_nodes = num_nodes
        self._num_places = num_places
        self._probs: list[float] = []
        self._newest = 0

    def add(self, parent: int, options: Options, probs: Sequence[float]) -> None:
        """Add the children of a node or of the tip, the likeliest first.

        Args:
            probs: the probability of each child if its parent is accepted; `options` may have more tokens.
        """
        self.options[parent] = options
        reached = 1.0 if parent == TIP else self._probs[parent]
        for token, prob in zip(options.token_ids, probs, strict=False):
            self._append(parent, token)
            self._probs.append(reached * prob)

    def next_level(self) -> list[int]:
        """Return the nodes to compute next: those of the last level whose children may become part of the draft.

        At most a quarter of the draft's nodes (and 4 where that is less) are computed at each level, the likeliest.
        Otherwise unlikely siblings of the first levels would use up the places of a tree that is deep.
        """
        best = self._best()
        least = self._probs[best[-1]] if len(best) == self._num_nodes else 0.0
        limit = min(max(self._num_nodes // 4, _LEAST_COMPUTED), self._num_places - self.num_computed)
        newest = (node for node in best if node >= self._newest and self._probs[node] > least)
        level = [node for node in newest if not self._ends(node)][:limit]
        self._newest = len(self.nodes)
        self._compute(level)
        return level

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
        return sorted(range(len(self.nodes)), key=lambda node: (-self._probs[node], node))[: self._num_nodes]
