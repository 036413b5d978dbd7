"""Chain: the draft tokens of one request as they are drawn, with what each of them was drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.draft import Draft, chain


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one forward pass drew, still on the device.

    Attributes:
        tokens: [n].
        top: [n, m] ids and [n, m] probabilities that the tokens were sampled from; the rejection rule only.
        candidates: [n, c] the likeliest next committed tokens, best first, -1 beyond what may be drawn; for
            running ahead only.
    """

    tokens: Tensor
    top: tuple[Tensor, Tensor] | None = None
    candidates: Tensor | None = None


@dataclass(slots=True)
class Chain:
    """One request's draft tokens; `top_ids`, `top_probs` and `candidates` are per token, or empty."""

    token_ids: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_probs: list[list[float]] = field(default_factory=list)
    candidates: list[list[int]] = field(default_factory=list)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for part in (self.token_ids, self.top_ids, self.top_probs, self.candidates):
            del part[length:]

    def draft(self) -> Draft:
        """Return the chain as it is sent to the target."""
        draft = chain(list(self.token_ids))
        return Draft(draft.token_ids, draft.parents, self.top_ids, self.top_probs) if self.top_ids else draft


def extend(chains: Sequence[Chain], drawn: Sequence[Drawn], counts: Sequence[int]) -> None:
    """Append each row's first `counts` draws to its chain; the one place where draws come to the host."""
    if not drawn:
        return
    tokens = torch.stack([one.tokens for one in drawn], 1).tolist()
    for own, row, count in zip(chains, tokens, counts, strict=True):
        own.token_ids += row[:count]
    tops = [one.top for one in drawn if one.top is not None]
    if tops:
        ids = torch.stack([top[0] for top in tops], 1).tolist()
        probs = torch.stack([top[1] for top in tops], 1).tolist()
        for own, row_ids, row_probs, count in zip(chains, ids, probs, counts, strict=True):
            own.top_ids += row_ids[:count]
            own.top_probs += row_probs[:count]
    ranked = [one.candidates for one in drawn if one.candidates is not None]
    if ranked:
        for own, row, count in zip(chains, torch.stack(ranked, 1).tolist(), counts, strict=True):
            own.candidates += row[:count]
