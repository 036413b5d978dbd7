"""Tree: the nodes of one request's draft tree as it grows, and in which order they are computed."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.protocols import Draft

TIP = -1
"""In place of a node: the committed tip."""
WIDTH = 3
"""Children of a node, at most, or chains from the tip, unless the configuration says otherwise."""


@dataclass(slots=True)
class Node:
    """A node of a tree.

    Attributes:
        depth: 1 for children of the tip.
        order: as which of the tree's nodes it was computed; None if it was not.
    """

    token_id: int
    parent: int
    depth: int
    order: int | None = None


class Tree(ABC):
    """Nodes that are appended, a parent before its children; how it grows is for subclasses to say.

    Attributes:
        nodes: the nodes so far.
        num_computed: how many of them were computed.
    """

    def __init__(self, end_ids: Collection[int]) -> None:
        self.nodes: list[Node] = []
        self.num_computed = 0
        self._end_ids = end_ids
        self._children: dict[tuple[int, int], int] = {}

    @abstractmethod
    def next_level(self) -> list[int]:
        """Return the nodes to compute next, all of one depth; empty when the tree is complete."""

    @abstractmethod
    def draft(self) -> Draft:
        """Return the tree as it is sent to the target, a node before its later siblings."""

    def child(self, parent: int, token: int) -> int | None:
        """Return the first node for a token after a node or the tip."""
        return self._children.get((parent, token))

    def path(self, node: int) -> list[int]:
        """Return the nodes from the tip to a node, itself included."""
        nodes: list[int] = []
        while node != TIP:
            nodes.append(node)
            node = self.nodes[node].parent
        return nodes[::-1]

    def order(self, node: int) -> int:
        """Return as which of the tree's nodes a node was computed."""
        order = self.nodes[node].order
        assert order is not None, "the node was not computed"
        return order

    def _append(self, parent: int, token: int) -> int:
        """Append a node after another or the tip; return its index."""
        node = len(self.nodes)
        self._children.setdefault((parent, token), node)
        self.nodes.append(Node(token, parent, 1 if parent == TIP else self.nodes[parent].depth + 1))
        return node

    def _ends(self, node: int) -> bool:
        """Return whether the text ends with a node."""
        return self.nodes[node].token_id in self._end_ids

    def _compute(self, level: Sequence[int]) -> None:
        """Note that these nodes are computed next."""
        for node in level:
            self.nodes[node].order = self.num_computed
            self.num_computed += 1
