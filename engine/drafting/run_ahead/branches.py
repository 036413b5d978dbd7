"""Branches: drafts for the likeliest verdicts, grown while the target verifies the draft that was sent.

A branch assumes a verdict and holds the draft for that case. All branches grow together, one token per forward pass.
A branch attends to its context up to the verdict, and to its own tokens. Its keys and values lie in scratch places
after the context's. They move to their final places when the verdict arrives.

If draft and target share their noise, the draft's scores predict the verdict: the closer the second-best score is to
the best, the likelier the target draws that token instead. Kumar, Dao and May, "Speculative Speculative Decoding"
(2603.03251), Theorem 12, predict it from recent accepted lengths. For the bundled pair at temperature 1, the actual
verdict is among the six likeliest in 0.75 of rounds by scores, in 0.64 by lengths.
"""

import itertools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from engine.control.acceptance import PRIOR, Acceptance
from engine.drafting.model.draft_cache import CachedPrefix
from engine.drafting.model.next_tokens import Confidence, NextTokens, Ranking, joined
from engine.drafting.model.token_drawer import Chain, Drawn, extend
from engine.execution.attention import Group, PagedContext
from engine.execution.batch import ForwardBatch, block_tensor
from engine.execution.kv_tensors import KVTensors
from engine.protocols import Request

Verdict = tuple[int, int]
"""How many draft tokens are accepted, and the token after them."""


@dataclass(slots=True, eq=False)
class DraftContext:
    """A copy of a request at its last proposal, the draft that was sent for it, and its prefix in the cache.

    Attributes:
        next_tokens: the likeliest tokens after 0, 1, ... accepted tokens.
        verdicts: per branch, the verdict that it assumes.
    """

    request: Request
    chain: Chain
    prefix: CachedPrefix
    next_tokens: list[NextTokens] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def base(self) -> int:
        return len(self.request.token_ids)

    @property
    def length(self) -> int:
        return self.base + len(self.chain.token_ids)

    def verdict(self, token_ids: Sequence[int]) -> Verdict | None:
        """Return the verdict on this draft that leads to these committed tokens; None if no single verdict does."""
        accepted = len(token_ids) - self.base - 1
        if accepted < 0 or list(token_ids[self.base : -1]) != self.chain.token_ids[:accepted]:
            return None
        return accepted, token_ids[-1]


class VerdictPredictor:
    """Predicts verdicts from the draft's scores; without shared noise, also from recent accepted lengths."""

    def __init__(self, num_draft_tokens: int, *, shares_noise: bool) -> None:
        self._acceptance = Acceptance([PRIOR] * num_draft_tokens)
        self._shares_noise = shares_noise
        self._confidence = Confidence()

    def gains(self) -> list[float]:
        """Return how likely each token of a chain is to be accepted, by recent acceptance rates."""
        rates = map(self._acceptance.rate, range(len(self._acceptance.odds)))
        return list(itertools.accumulate(rates, operator.mul))

    def learn(self, context: DraftContext, accepted: int, token: int) -> None:
        """Learn from the verdict on a draft: `accepted` tokens, then `token`."""
        drafted = context.chain.token_ids
        for place in range(min(accepted + 1, len(drafted))):
            self._acceptance.observe(place, accepted=place < accepted)
        # Without shared noise, the scores predict only the token after the last accepted token.
        first = 0 if self._shares_noise else accepted
        committed = [*drafted[first:accepted], token]
        for next_tokens, committed_token in zip(context.next_tokens[first : accepted + 1], committed, strict=False):
            self._confidence.learn(context.request, next_tokens, committed_token)

    def rank(self, contexts: Sequence[DraftContext], tips: Ranking) -> None:
        """Set the contexts' `next_tokens`; `tips` rank the tokens after each draft's last token."""
        rows = [row for i, context in enumerate(contexts) for row in (*context.chain.rankings, (tips, i))]
        next_tokens = iter(joined(rows).next_tokens())
        for context in contexts:
            context.next_tokens = list(itertools.islice(next_tokens, len(context.chain.token_ids) + 1))
            context.chain.rankings.clear()

    def predict(self, context: DraftContext, count: int, end_ids: Collection[int]) -> list[Verdict]:
        """Return at most `count` of the likeliest verdicts, best first; verdicts that end the text are left out."""
        drafted = context.chain.token_ids
        verdicts: list[tuple[float, Verdict]] = []
        reached = 1.0
        for accepted, (token_ids, scores) in enumerate(context.next_tokens):
            if not token_ids:
                break
            weights = dict(zip(token_ids, self._confidence.weights(context.request, scores), strict=True))
            # A draft token cannot be the token after its own rejection.
            kept = weights.pop(drafted[accepted], 0.0) if accepted < len(drafted) else 0.0
            rejected = sum(weights.values())
            stays = kept / (kept + rejected)
            if accepted < len(drafted) and not self._shares_noise:
                stays = self._acceptance.rate(accepted)
            if rejected:
                share = reached * (1 - stays) / rejected
                verdicts += [(share * weight, (accepted, token)) for token, weight in weights.items()]
            reached *= stays
        verdicts.sort(key=lambda verdict: verdict[0], reverse=True)
        return [verdict for _, verdict in verdicts if verdict[1] not in end_ids][:count]


class Branches:
    """The growing branches of some contexts, padded to `width` per context.

    The cache entry of branch b at step s lies `s * width + b` places behind its context.
    """

    def __init__(self, contexts: Sequence[DraftContext], width: int, kv: KVTensors) -> None:
        self.contexts = list(contexts)
        self._width = width
        self._kv = kv
        self._drawn: list[Drawn] = []
        device = kv.input_device
        # A context with fewer branches computes its last branch more than once.
        self._verdicts = [(context.verdicts + context.verdicts[-1:] * width)[:width] for context in contexts]
        self._first_tokens = torch.tensor([token for row in self._verdicts for _, token in row], device=device)
        self.tips = [
            [context.base + accepted + 1 for accepted, _ in verdicts]
            for context, verdicts in zip(contexts, self._verdicts, strict=True)
        ]
        """Per context and branch, how many tokens are committed if the branch's verdict arrives."""
        self._table = block_tensor([context.prefix.block_ids for context in contexts], device)
        self._first = torch.tensor(self.tips, device=device) - 1
        starts = torch.tensor([[context.length] for context in contexts], device=device)
        self._places = starts + torch.arange(width, device=device)
        self._indices = torch.arange(self._first_tokens.numel(), device=device)

    @property
    def num_computed(self) -> int:
        """Computed tokens of each branch, including its first token."""
        return len(self._drawn)

    def next_pass(self) -> ForwardBatch:
        """Return the pass that computes every branch's last token."""
        step = self.num_computed
        entries = self._places.unsqueeze(-1) + torch.arange(step + 1, device=self._places.device) * self._width
        group = Group(
            start=0,
            rows=len(self.contexts),
            length=self._width,
            blocks=self._table,
            positions=self._first + step,
            places=entries[:, :, -1],
            limits=self._first,
            extra=entries,
        )
        tokens = self._drawn[-1].tokens if self._drawn else self._first_tokens
        return ForwardBatch(tokens, self._indices, PagedContext(self._kv, [group]))

    def add(self, drawn: Drawn) -> None:
        self._drawn.append(drawn)

    def depths(self) -> list[list[int]]:
        """Return, per context and branch, the number of tokens between the tip and the next draw."""
        return [[accepted + 1 + self.num_computed for accepted, _ in verdicts] for verdicts in self._verdicts]

    def paths(self) -> list[list[list[int]]]:
        """Return, per context and branch, the tokens between the tip and the next draw."""
        drawn = [step.tokens for step in self._drawn]
        rows = iter(torch.stack(drawn, -1).tolist()) if drawn else itertools.repeat([])
        return [
            [[*context.chain.token_ids[:accepted], token, *next(rows)] for accepted, token in verdicts]
            for context, verdicts in zip(self.contexts, self._verdicts, strict=True)
        ]

    def chains(self, chosen: Sequence[tuple[DraftContext, int]]) -> list[Chain]:
        """Return the drafts of some branches, as far as they have grown."""
        chains = [Chain() for _ in chosen]
        rows = [self.contexts.index(context) * self._width + branch for context, branch in chosen]
        extend(chains, self._drawn, rows, [self.num_computed] * len(chains))
        return chains

    def move(self, chosen: Sequence[tuple[DraftContext, int]]) -> None:
        """Move the keys and values of some branches to their final places."""
        sources: list[int] = []
        targets: list[int] = []
        for context, branch in chosen:
            scratch, final = self.entries(context, branch)
            sources += [self._kv.slot(context.prefix.block_ids, place) for place in scratch]
            targets += [self._kv.slot(context.prefix.block_ids, place) for place in final]
        self._kv.move(sources, targets)

    def entries(self, context: DraftContext, branch: int) -> tuple[list[int], list[int]]:
        """Return the scratch places of a branch's computed tokens, and their final places."""
        scratch, first = context.length + branch, context.base + context.verdicts[branch][0]
        steps = range(self.num_computed)
        return [scratch + step * self._width for step in steps], [first + step for step in steps]
