"""LevelwiseDrafter: drafts a tree for every request of a batch, one forward pass for each level.

A node's keys and values follow the committed tokens, in the order of computation. The next proposal moves accepted
nodes' entries to their final slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, cast

import torch

from engine.config import TREE_WIDTH, EngineConfig
from engine.drafting.model.draft_cache import CachedPrefix, DraftCache
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.feature_cache import make_cache
from engine.drafting.model.token_drawer import TokenDrawer
from engine.execution.attention import Group, PagedContext
from engine.execution.batch import ForwardBatch, block_tensor
from engine.protocols import NO_DRAFT, Draft, ProposeRow, Request, run_in_process

TIP = 0
"""The root of every tree: the committed tip, which is not drafted."""


@dataclass(slots=True)
class Node:
    """A node of a tree; `path` holds the nodes from the tip's child to this node, and is empty for the tip."""

    token_id: int
    parent: int
    path: list[int]
    compute_index: int | None = None
    """Position in the order of computation; None before it is computed."""


class Tree(ABC):
    """Nodes in order, parents before children; subclasses decide how a tree grows."""

    def __init__(self, base: int, end_ids: Collection[int]) -> None:
        """Start at a tip with `base` committed tokens; tokens `end_ids` get no children."""
        self.base = base
        self.nodes = [Node(-1, -1, [])]
        self.num_computed = 0
        self._end_ids = end_ids
        self._children: dict[tuple[int, int], int] = {}

    @abstractmethod
    def next_level(self) -> list[int]:
        """Return the nodes to compute next, all of one depth; empty when the tree is complete."""

    @abstractmethod
    def draft(self) -> Draft:
        """Return the tree as it is sent to the target, siblings in order."""

    def child(self, parent: int, token: int) -> int | None:
        return self._children.get((parent, token))

    def compute_index(self, node: int) -> int:
        """Return a computed node's position in the order of computation."""
        index = self.nodes[node].compute_index
        assert index is not None, "the node was not computed"
        return index

    def _append(self, parent: int, token: int) -> None:
        node = len(self.nodes)
        self._children.setdefault((parent, token), node)
        self.nodes.append(Node(token, parent, [*self.nodes[parent].path, node]))

    def _ends(self, node: int) -> bool:
        return self.nodes[node].token_id in self._end_ids

    def _compute(self, level: Sequence[int]) -> None:
        for node in level:
            self.nodes[node].compute_index = self.num_computed
            self.num_computed += 1

    def _draft_of(self, chosen: Sequence[int]) -> Draft:
        index = {node: i for i, node in enumerate([TIP, *chosen], start=-1)}
        nodes = [self.nodes[node] for node in chosen]
        return Draft([node.token_id for node in nodes], [index[node.parent] for node in nodes])


T = TypeVar("T", bound=Tree)


class TreeLevel(NamedTuple, Generic[T]):
    """The nodes of one request's tree that a pass computes."""

    request: Request
    tree: T
    nodes: list[int]

    @property
    def paths(self) -> list[list[int]]:
        """Per node, the draft tokens up to it."""
        return [[self.tree.nodes[step].token_id for step in self.tree.nodes[node].path] for node in self.nodes]

    @property
    def depths(self) -> list[int]:
        return [len(self.tree.nodes[node].path) for node in self.nodes]


class Kept(NamedTuple):
    """A request's cache entries that stay after a verdict, before they are moved."""

    prefix: CachedPrefix
    base: int
    """How many tokens were committed before the verdict."""
    token_ids: list[int]
    """The tokens after `base` whose entries stay."""
    compute_indices: list[int]
    """Each such entry's position in the tree's order of computation."""


class LevelwiseDrafter(ABC, Generic[T]):
    """Drafts trees with a model in this process; subclasses choose shapes and tokens."""

    def __init__(self, draft: DraftModel, config: EngineConfig) -> None:
        self.width = TREE_WIDTH
        self._backend = draft.backend
        self.cache, self._drawer = self.parts(draft, config)

    def parts(self, draft: DraftModel, config: EngineConfig) -> tuple[DraftCache, TokenDrawer]:
        """Return the cache of the trees' entries and the drawer of their tokens."""
        cache = make_cache(draft, config)
        return cache, TokenDrawer(draft, cache.kv, config, ranks=True)

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        with torch.inference_mode():
            trees = [(row.request, self.tree_of(row.request.request_id)) for row in rows]
            self.keep([self.follow(request, tree)[1] for request, tree in trees if tree])
            current = {row.request.request_id for row in rows}
            able = [row for row in rows if row.num_draft_tokens and self.cache.make_room(row, [], current)]
            if able:
                requests = [row.request for row in able]
                self.grow(able, run_in_process(self.cache.catch_up(requests)))
                self.cache.hold(requests)
            grown = [self.tree_of(row.request.request_id) for row in rows]
            return [tree.draft() if tree else NO_DRAFT for tree in grown]

    def tree_of(self, request_id: str) -> T | None:
        """Return the request's last tree, if the cache holds its entries."""
        prefix = self.cache.prefixes.get(request_id)
        return None if prefix is None else cast("T | None", prefix.scratch)

    def release(self, request_id: str) -> None:
        self.cache.release(request_id)
        self._drawer.release(request_id)

    @abstractmethod
    def plant(self, request: Request, num_nodes: int) -> T:
        """Return an empty tree for a request, of at most `num_nodes` nodes."""

    @abstractmethod
    def compute(self, batch: ForwardBatch, levels: Sequence[TreeLevel[T]]) -> None:
        """Compute a level and add its children."""

    @abstractmethod
    def learn(self, request: Request, tree: T, node: int, token: int) -> None:
        """Learn which token was committed after a node."""

    def follow(self, request: Request, tree: T) -> tuple[int, Kept]:
        """Learn from the verdict and drop the tree; return its last committed computed node, and what stays."""
        node, indices = TIP, []
        for token in request.token_ids[tree.base :]:
            self.learn(request, tree, node, token)
            child = tree.child(node, token)
            if child is None or tree.nodes[child].compute_index is None:
                break
            node = child
            indices.append(tree.compute_index(node))
        prefix, accepted = self.cache.prefixes[request.request_id], request.token_ids[tree.base :][: len(indices)]
        prefix.scratch = None
        return node, Kept(prefix, tree.base, accepted, indices)

    def keep(self, kept: Collection[Kept]) -> None:
        sources, targets = [], []
        for prefix, base, _, compute_indices in kept:
            moved = [(base + index, base + i) for i, index in enumerate(compute_indices) if index != i]
            sources += [self.cache.kv.slot(prefix.block_ids, source) for source, _ in moved]
            targets += [self.cache.kv.slot(prefix.block_ids, target) for _, target in moved]
        if sources:
            self.cache.kv.move(sources, targets)
        for entries in kept:
            entries.prefix.token_ids += entries.token_ids

    def batch(self, levels: Sequence[TreeLevel[T]]) -> ForwardBatch:
        """Return the pass that computes a level: a node attends to the committed tokens and its path."""
        length = max(len(level.nodes) for level in levels)
        deepest = max(depth for level in levels for depth in level.depths)
        tables = [self.cache.prefixes[level.request.request_id].block_ids for level in levels]
        tokens, positions, places, extra = [], [], [], []
        indices: list[int] = []
        for row, level in enumerate(levels):
            tree, nodes, padding = level.tree, level.nodes, length - len(level.nodes)
            tokens += [tree.nodes[node].token_id for node in nodes] + [0] * padding
            positions.append([tree.base + depth - 1 for depth in level.depths] + [0] * padding)
            places.append([tree.base + tree.compute_index(node) for node in nodes] + [-1] * padding)
            paths = [[tree.base + tree.compute_index(step) for step in tree.nodes[node].path] for node in nodes]
            # Every node attends to place 0 anyway, because it is committed.
            extra.append([path + [0] * (deepest - len(path)) for path in paths + [[]] * padding])
            indices += range(row * length, row * length + len(nodes))
        device = self.cache.kv.input_device
        group = Group(
            start=0,
            rows=len(levels),
            length=length,
            blocks=block_tensor(tables, device),
            positions=torch.tensor(positions, device=device),
            places=torch.tensor(places, device=device),
            limits=torch.tensor([[level.tree.base] * length for level in levels], device=device),
            extra=torch.tensor(extra, device=device),
        )
        context = PagedContext(self.cache.kv, [group])
        return ForwardBatch(torch.tensor(tokens, device=device), torch.tensor(indices, device=device), context)

    def grow(self, rows: Sequence[ProposeRow], batch: ForwardBatch) -> list[T]:
        """Return a tree per row; `batch` computes the tips and their logits."""
        trees = [self.plant(row.request, row.num_draft_tokens) for row in rows]
        levels = [TreeLevel(row.request, tree, [TIP]) for row, tree in zip(rows, trees, strict=True)]
        while True:
            self.compute(batch, levels)
            levels = [TreeLevel(row.request, tree, tree.next_level()) for row, tree in zip(rows, trees, strict=True)]
            levels = [level for level in levels if level.nodes]
            if not levels:
                for row, tree in zip(rows, trees, strict=True):
                    self.cache.prefixes[row.request.request_id].scratch = tree
                return trees
            batch = self.batch(levels)
