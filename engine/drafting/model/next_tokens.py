"""The likeliest next tokens by a draft's scores: ranked on the device, and how probable they are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.protocols import Request
from engine.sampling.top_tokens import copied

NUM_CANDIDATES = 10
"""Next tokens that are considered at each position."""
_PRIOR_SHARPNESS = 3.0
_STEP = 0.03
_LARGEST_SURPRISE = 5.0


class NextTokens(NamedTuple):
    """The likeliest possible next tokens at one position, best first, with their scores."""

    token_ids: list[int]
    scores: list[float]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Scores of the possible next tokens: the higher a token's score, the likelier it is committed."""

    scores: Tensor  # [n, m]
    token_ids: Tensor | None = None  # [n, m] the scored tokens; None if column i is token i

    def top(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the highest scores of each row and their tokens, [n, count] each, best first."""
        scores, ids = self.scores.topk(min(count, self.scores.shape[-1]), -1)
        return scores, ids if self.token_ids is None else self.token_ids.gather(-1, ids)

    def next_tokens(self) -> list[NextTokens]:
        """Return up to `NUM_CANDIDATES` possible tokens of each row; waits for the device; none for a row with NaN."""
        scores, ids = (tensor.tolist() for tensor in self.top(NUM_CANDIDATES))
        counts = [next((i for i, score in enumerate(row) if not math.isfinite(score)), len(row)) for row in scores]
        return [NextTokens(tokens[:n], row[:n]) for tokens, row, n in zip(ids, scores, counts, strict=True)]


RankedRow = tuple[Ranking, int]
"""One row of a ranking, which is not copied until it is needed."""


def joined(rows: Sequence[RankedRow]) -> Ranking:
    """Return one ranking of these rows, in order; either all or none have `token_ids`."""
    groups: dict[int, list[int]] = {}
    for place, (ranking, _) in enumerate(rows):
        groups.setdefault(id(ranking), []).append(place)
    places = [place for group in groups.values() for place in group]
    device = rows[0][0].scores.device
    order = copied([index for _, index in sorted(zip(places, range(len(places)), strict=True))], device)
    members = [(rows[group[0]][0], copied([rows[place][1] for place in group], device)) for group in groups.values()]
    scores = torch.cat([ranking.scores[indices] for ranking, indices in members])[order]
    ids = [ranking.token_ids[indices] for ranking, indices in members if ranking.token_ids is not None]
    return Ranking(scores, torch.cat(ids)[order] if ids else None)


class Confidence:
    """How reliable the draft's scores are: P(token) ~ exp(sharpness * score), with a learned sharpness.

    Greedy and sampled requests have separate values: noise lets unlikely tokens win, where models differ more.
    """

    def __init__(self) -> None:
        self._sharpness = dict.fromkeys((False, True), _PRIOR_SHARPNESS)

    def weights(self, request: Request, scores: Sequence[float]) -> list[float]:
        """Return unnormalised probabilities of tokens with these descending scores; the first is 1."""
        sharpness = self._sharpness[request.params.temperature == 0]
        return [math.exp(sharpness * (score - scores[0])) for score in scores]

    def learn(self, request: Request, next_tokens: NextTokens, committed: int) -> None:
        """Step up the gradient of the committed token's log probability; an unlisted token counts as the last."""
        ids, scores = next_tokens
        if not ids:
            return
        weights = self.weights(request, scores)
        expected = sum(weight * score for weight, score in zip(weights, scores, strict=True)) / sum(weights)
        is_greedy = request.params.temperature == 0
        score = scores[ids.index(committed)] if committed in ids else scores[-1]
        surprise = self._sharpness[is_greedy] * (score - expected)
        self._sharpness[is_greedy] *= math.exp(_STEP * max(-_LARGEST_SURPRISE, min(_LARGEST_SURPRISE, surprise)))
