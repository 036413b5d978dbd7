"""TreeDrafter: a small model drafts a tree for every request of a batch, one forward pass for each of its levels.

Under the coupled rule, the children of a node are the tokens with the highest scores under the noise that the target
will draw with: the target's token is among them as often as possible, and the first is what a chain would have. The
shape of the tree is that of the likeliest nodes (`best_first`), by how far scores could be trusted in earlier rounds.

A node's keys and values lie behind the committed tokens in the order in which nodes are computed; those of accepted
nodes are moved to their places when the next proposal brings the committed tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from engine.config import EngineConfig
from engine.drafting.best_first import BestFirstTree
from engine.drafting.cached_prefix import CachedPrefix, Text
from engine.drafting.chain import Drawn
from engine.drafting.model import ModelDrafter, finish
from engine.drafting.nodes import TIP, WIDTH, Tree
from engine.drafting.run_ahead.foresight import NUM_CANDIDATES
from engine.drafting.run_ahead.verdicts import Confidence, Options
from engine.execution.attention import Group, PagedContext
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch
from engine.protocols import NO_DRAFT, Draft, ProposeRow, Request
from engine.sampling.grammar import Grammars
from engine.sampling.logits import Run

COMPUTED_PER_NODE = 4
"""Nodes that may be computed for each node of a draft."""

T = TypeVar("T", bound=Tree)


class Growth(NamedTuple, Generic[T]):
    """One request whose tree grows, and the nodes of it that a pass computes."""

    request: Request
    tree: T
    level: list[int]

    @property
    def paths(self) -> list[list[int]]:
        """Per node of the level, the draft tokens up to it."""
        return [[self.tree.nodes[step].token_id for step in self.tree.path(node)] for node in self.level]

    @property
    def depths(self) -> list[int]:
        """Per node of the level, how many draft tokens there are between the committed tip and what is drawn next."""
        return [0 if node == TIP else self.tree.nodes[node].depth for node in self.level]


class AnyTreeDrafter(ModelDrafter, ABC, Generic[T]):
    """Drafts trees with a model in this process; subclasses choose their shape and their tokens."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        *,
        token_limit: int | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Make the draft's KV cache; see `ModelDrafter`."""
        super().__init__(backend, config, token_limit=token_limit, ranks=True, grammars=grammars)
        self._width = config.tree_width or WIDTH
        self._sent: dict[str, tuple[int, T]] = {}
        """The last tree of each request, and how many committed tokens it had then."""

    def release(self, request_id: str) -> None:
        """Free a request's blocks."""
        self._sent.pop(request_id, None)
        super().release(request_id)

    @abstractmethod
    def _plant(self, request: Request, num_nodes: int) -> T:
        """Return an empty tree for a request, of at most `num_nodes` nodes."""

    @abstractmethod
    def _branch_out(self, batch: ForwardBatch, growths: Sequence[Growth[T]]) -> None:
        """Compute a level and add its children."""

    @abstractmethod
    def _learn(self, request: Request, tree: T, node: int, token: int) -> None:
        """Learn which token was committed after a node or the tip."""

    def _propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        for row in rows:
            self._keep_accepted(row.request)
        drafts = [NO_DRAFT] * len(rows)
        current = {row.request.request_id for row in rows}
        able = [i for i, row in enumerate(rows) if row.num_draft_tokens and self._make_room(row, [], current)]
        if able:
            for i, tree in zip(able, self._grow([rows[i] for i in able]), strict=True):
                request = rows[i].request
                self._sent[request.request_id] = len(request.token_ids), tree
                drafts[i] = tree.draft()
        return drafts

    def _keep_accepted(self, request: Request) -> None:
        """Move the keys and values of nodes that were accepted to their places, and learn from the committed tokens."""
        if request.request_id not in self._sent:
            return
        base, tree = self._sent.pop(request.request_id)
        path = self._follow(request, base, tree)
        prefix = self._prefixes[request.request_id]
        prefix.token_ids += request.token_ids[base : base + len(path)]
        sources, targets = self._moves(prefix, base, [tree.order(node) for node in path])
        if sources:
            self._kv.move(sources, targets)

    def _follow(self, request: Request, base: int, tree: T) -> list[int]:
        """Return the computed nodes of a tree that were committed, and learn from the committed tokens.

        Args:
            base: how many tokens were committed when the tree was planted.
        """
        path: list[int] = []
        for token in request.token_ids[base:]:
            node = path[-1] if path else TIP
            self._learn(request, tree, node, token)
            child = tree.child(node, token)
            if child is None or tree.nodes[child].order is None:
                break
            path.append(child)
        return path

    def _moves(self, prefix: CachedPrefix, base: int, orders: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the slots from and to which entries must move, so that those of these nodes follow `base` in turn.

        Args:
            orders: as which of its tree's nodes each was computed.
        """
        pairs = [(base + order, base + place) for place, order in enumerate(orders) if order != place]
        sources, targets = ([self._kv.slot(prefix.block_ids, pair[end]) for pair in pairs] for end in (0, 1))
        return sources, targets

    def _grow(self, rows: Sequence[ProposeRow]) -> list[T]:
        """Return a tree of at most `num_draft_tokens` nodes per row, after computing as many levels as they have."""
        trees = [self._plant(row.request, row.num_draft_tokens) for row in rows]
        growths = [Growth(row.request, tree, [TIP]) for row, tree in zip(rows, trees, strict=True)]
        batch = finish(self._reach_tips(growths))
        while growths:
            self._branch_out(batch, growths)
            levels = [tree.next_level() for tree in trees]
            growths = [Growth(row.request, tree, level) for row, tree, level in zip(rows, trees, levels, strict=True)]
            growths = [growth for growth in growths if growth.level]
            if growths:
                batch = self._batch(growths)
        return trees

    def _reach_tips(self, growths: Sequence[Growth[T]]) -> Generator[None, None, ForwardBatch]:
        """Compute what is missing of the committed tokens, but the last ones, yielding after every pass.

        Returns:
            The pass that remains, which computes the tips; it must be the next one that is run.
        """
        prefixes = [self._prefixes[growth.request.request_id] for growth in growths]
        texts = [Text(growth.request.token_ids, []) for growth in growths]
        batch = yield from self._catch_up(texts, prefixes)
        for text, prefix in zip(texts, prefixes, strict=True):
            prefix.token_ids += text.part(len(prefix.token_ids), text.length)
        return batch

    def _runs_of(self, growths: Sequence[Growth[T]]) -> list[Run]:
        """Return a run per request, with a row per node of its level."""
        requests = [growth.request for growth in growths]
        depths = [growth.depths for growth in growths]
        return self._runs(requests, depths, lambda: [growth.paths for growth in growths])

    def _batch(self, growths: Sequence[Growth[T]]) -> ForwardBatch:
        """Return the pass that computes a level: a node attends to the committed tokens, its path and itself."""
        prefixes: list[CachedPrefix] = [self._prefixes[growth.request.request_id] for growth in growths]
        length = max(len(growth.level) for growth in growths)
        deepest = max(depth for growth in growths for depth in growth.depths)
        width = max(len(prefix.block_ids) for prefix in prefixes)
        tokens, positions, places, extra, tables, bases = [], [], [], [], [], []
        indices: list[int] = []
        for row, (prefix, growth) in enumerate(zip(prefixes, growths, strict=True)):
            request, tree, level = growth
            base, padding = len(request.token_ids), length - len(level)
            bases.append(base)
            tokens += [tree.nodes[node].token_id for node in level] + [0] * padding
            positions.append([base + depth - 1 for depth in growth.depths] + [0] * padding)
            places.append([base + tree.order(node) for node in level] + [-1] * padding)
            paths = [[base + tree.order(step) for step in tree.path(node)] for node in level] + [[]] * padding
            # Place 0 is committed, so every node attends to it in any case.
            extra.append([path + [0] * (deepest - len(path)) for path in paths])
            tables.append(prefix.block_ids + [0] * (width - len(prefix.block_ids)))
            indices += range(row * length, row * length + len(level))
        device = self._kv.input_device
        group = Group(
            start=0,
            rows=len(growths),
            length=length,
            blocks=torch.tensor(tables, device=device),
            positions=torch.tensor(positions, device=device),
            places=torch.tensor(places, device=device),
            limits=torch.tensor(bases, device=device).unsqueeze(-1).repeat(1, length),
            extra=torch.tensor(extra, device=device),
        )
        return ForwardBatch(
            torch.tensor(tokens, device=device), torch.tensor(indices, device=device), PagedContext(self._kv, [group])
        )

    def _end_ids(self, request: Request) -> set[int]:
        """Return the tokens after which a request ends."""
        params = request.params
        return {*(() if params.ignore_eos else self.backend.info.eos_token_ids), *params.stop_token_ids}


class TreeDrafter(AnyTreeDrafter[BestFirstTree]):
    """Drafts the likeliest nodes by the scores that draft and target share, for rules that share noise."""

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
        # Greedy requests are learned apart: noise lets unlikely tokens win, where draft and target differ more.
        self._confidence = {is_greedy: Confidence() for is_greedy in (False, True)}
        self._num_children = self._width

    def _plant(self, request: Request, num_nodes: int) -> BestFirstTree:
        tree = BestFirstTree(num_nodes, end_ids=self._end_ids(request), width=self._width)
        # Many nodes turn out not to be among the best after they were computed.
        self._reserve(request, tree, COMPUTED_PER_NODE * num_nodes)
        return tree

    def _reserve(self, request: Request, tree: BestFirstTree, num_places: int) -> None:
        """Let up to `num_places` nodes of a tree be computed, as far as there are free blocks for them."""
        prefix, length = self._prefixes[request.request_id], len(request.token_ids)
        missing = self._pool.blocks_for(length + num_places) - len(prefix.block_ids)
        prefix.block_ids += self._pool.allocate(max(missing, 0)) or []
        tree.num_places = min(num_places, len(prefix.block_ids) * self._kv.block_size - length)

    def _branch_out(self, batch: ForwardBatch, growths: Sequence[Growth[BestFirstTree]]) -> None:
        self._add_children(growths, self._launch(batch, growths))

    def _launch(self, batch: ForwardBatch, growths: Sequence[Growth[BestFirstTree]]) -> Drawn:
        """Launch the pass that computes a level."""
        params = [growth.request.params for growth in growths for _ in growth.level]
        positions = [len(growth.request.token_ids) + depth for growth in growths for depth in growth.depths]
        (draws,) = self._plan(params, positions, 1)
        return self._pass(batch, draws, lambda: self._runs_of(growths))

    def _add_children(self, growths: Sequence[Growth[BestFirstTree]], drawn: Drawn) -> None:
        """Wait for a pass that was launched, and add the children of the level that it computed."""
        self.backend.wait()
        assert drawn.ranking is not None
        scores, ids = (iter(tensor.tolist()) for tensor in drawn.ranking.top(NUM_CANDIDATES))
        for growth in growths:
            confidence = self._confidence_in(growth.request)
            for node in growth.level:
                possible = [score for score in next(scores) if score > float("-inf")]
                options = Options(next(ids)[: len(possible)], possible)
                weights = confidence.weights(possible) if possible else []
                growth.tree.add(node, options, [weight / sum(weights) for weight in weights[: self._num_children]])

    def _learn(self, request: Request, tree: BestFirstTree, node: int, token: int) -> None:
        if (options := tree.options.get(node)) is not None and options.token_ids:
            self._confidence_in(request).observe(options.scores, options.index(token))

    def _confidence_in(self, request: Request) -> Confidence:
        return self._confidence[request.params.temperature == 0]
