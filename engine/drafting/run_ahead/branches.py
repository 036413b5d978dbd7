"""Trunk and Branches: drafts for likely verdicts, grown while the target verifies the draft that was sent.

A trunk is one request's committed tokens and the draft that was sent for them. A branch assumes a verdict (how many
tokens are accepted, and which token follows) and holds the draft for that case. The branches of all trunks grow
together, one token per forward pass. A branch attends to its trunk up to the verdict, and to its own tokens. Its keys
and values lie in scratch places after the trunk's; when its verdict arrives, they move to their final places.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.drafting.chain import Chain, Drawn, extend
from engine.drafting.run_ahead.verdicts import Options
from engine.execution.attention import Group, KVTensors, PagedContext
from engine.execution.batch import ForwardBatch
from engine.protocols import Request
from engine.sampling.params import SamplingParams


@dataclass(slots=True, eq=False)
class Trunk:
    """One request as it was last proposed for.

    Attributes:
        request: a copy, so that its tokens stay those that were committed then.
        chain: the draft that was sent.
        outlook: [length + 1], the likeliest tokens after each number of accepted tokens.
        roots: per branch, the verdict it assumes: how many accepted, and the token after them.
    """

    request: Request
    chain: Chain
    outlook: list[Options] = field(default_factory=list)
    roots: list[tuple[int, int]] = field(default_factory=list)

    @property
    def base(self) -> int:
        """Number of tokens that were committed when the draft was sent."""
        return len(self.request.token_ids)

    def verdict(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Return the verdict that leads to these committed tokens: how many accepted, and the token after them.

        None if they are not what one verdict on this draft can commit.
        """
        accepted = len(token_ids) - self.base - 1
        if not 0 <= accepted <= len(self.chain.token_ids):
            return None
        if list(token_ids[self.base : -1]) != self.chain.token_ids[:accepted]:
            return None
        return accepted, token_ids[-1]


class Branches:
    """The branches of some trunks, padded to the same number per trunk, as they grow.

    Branch b's entry of step s lies `s * width + b` places behind its trunk.

    Attributes:
        roots: [trunks * width] the first token of each branch.
        num_computed: computed tokens of each branch, its root included.
    """

    def __init__(self, trunks: Sequence[Trunk], width: int, tables: Sequence[Sequence[int]], kv: KVTensors) -> None:
        """Lay out the branches.

        Args:
            width: branches per trunk, padding included.
            tables: the trunks' block tables, scratch places included.
        """
        self.trunks = list(trunks)
        self.num_computed = 0
        self._width = width
        self._kv = kv
        self._drawn: list[Drawn] = []
        device = kv.input_device
        # A trunk with fewer branches computes its last one more than once.
        self._verdicts = [(trunk.roots + trunk.roots[-1:] * width)[:width] for trunk in trunks]
        first_tokens = [token for verdicts in self._verdicts for _, token in verdicts]
        self.roots = torch.tensor(first_tokens, device=device)
        accepted = torch.tensor([[count for count, _ in verdicts] for verdicts in self._verdicts], device=device)
        blocks = max(len(table) for table in tables)
        self._table = torch.tensor([[*table, *[0] * (blocks - len(table))] for table in tables], device=device)
        self._first = torch.tensor([trunk.base for trunk in trunks], device=device).unsqueeze(-1) + accepted
        self._places = torch.tensor(
            [trunk.base + len(trunk.chain.token_ids) for trunk in trunks], device=device
        ).unsqueeze(-1) + torch.arange(width, device=device)
        self._indices = torch.arange(self.roots.numel(), device=device)

    def next_pass(self, tokens: Tensor) -> ForwardBatch:
        """Return the pass that computes every branch's next token, `tokens` [trunks * width]."""
        step = self.num_computed
        entries = self._places.unsqueeze(-1) + torch.arange(step + 1, device=self._places.device) * self._width
        group = Group(
            start=0,
            rows=len(self.trunks),
            length=self._width,
            blocks=self._table,
            positions=self._first + step,
            places=entries[:, :, -1],
            limits=self._first,
            extra=entries,
        )
        return ForwardBatch(tokens, self._indices, PagedContext(self._kv, [group]))

    def add(self, drawn: Drawn) -> None:
        """Append the tokens that the pass drew."""
        self.num_computed += 1
        self._drawn.append(drawn)

    def depths(self) -> list[list[int]]:
        """Return, per trunk and branch, the number of tokens between the tip and the next draw."""
        return [[accepted + 1 + self.num_computed for accepted, _ in verdicts] for verdicts in self._verdicts]

    def tips(self) -> list[list[int]]:
        """Return, per trunk and branch, how many tokens are committed if the branch's verdict arrives."""
        return [
            [trunk.base + accepted + 1 for accepted, _ in verdicts]
            for trunk, verdicts in zip(self.trunks, self._verdicts, strict=True)
        ]

    def draws(self) -> tuple[list[SamplingParams], list[int]]:
        """Return, per branch, the request's parameters and the position of the first token that is drawn."""
        params = [trunk.request.params for trunk in self.trunks for _ in range(self._width)]
        return params, [
            trunk.base + accepted + 1
            for trunk, verdicts in zip(self.trunks, self._verdicts, strict=True)
            for accepted, _ in verdicts
        ]

    def paths(self) -> list[list[list[int]]]:
        """Return, per trunk and branch, the tokens between the tip and the next draw."""
        drawn = torch.stack([one.tokens for one in self._drawn], -1).tolist() if self._drawn else []
        rows = iter(drawn or [[]] * self.roots.numel())
        return [
            [[*trunk.chain.token_ids[:accepted], token, *next(rows)] for accepted, token in verdicts]
            for trunk, verdicts in zip(self.trunks, self._verdicts, strict=True)
        ]

    def chains(self, chosen: Sequence[tuple[Trunk, int]]) -> list[Chain]:
        """Return the drafts of some branches, as far as they have grown."""
        chains = [Chain() for _ in chosen]
        rows = [self.trunks.index(trunk) * self._width + branch for trunk, branch in chosen]
        extend(chains, self._drawn, rows, [self.num_computed] * len(chains))
        return chains

    def move(self, chosen: Sequence[tuple[Trunk, int]], tables: Sequence[Sequence[int]]) -> None:
        """Move the keys and values of some branches to their final places; `tables` are the block tables of each."""
        sources: list[int] = []
        targets: list[int] = []
        for (trunk, branch), table in zip(chosen, tables, strict=True):
            scratch, final = self.entries(trunk, branch)
            sources += [self._kv.slot(table, place) for place in scratch]
            targets += [self._kv.slot(table, place) for place in final]
        self._kv.move(sources, targets)

    def entries(self, trunk: Trunk, branch: int) -> tuple[list[int], list[int]]:
        """Return the scratch places of a branch's computed tokens, and their final places."""
        scratch = trunk.base + len(trunk.chain.token_ids) + branch
        first = trunk.base + trunk.roots[branch][0]
        steps = range(self.num_computed)
        return [scratch + step * self._width for step in steps], [first + step for step in steps]
