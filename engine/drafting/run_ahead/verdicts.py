"""How likely each verdict on a draft is: how many tokens are accepted, and which token follows.

If draft and target share their noise, the draft's scores predict the verdict: the closer the second-best score is to
the best, the likelier the target draws that token instead. Kumar, Dao and May, "Speculative Speculative Decoding"
(2603.03251), Theorem 12, predict it from how often each length was accepted recently. For the bundled pair at
temperature 1, the six likeliest verdicts by scores contain the actual verdict in 0.75 of rounds, those by lengths in
0.64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

_DECAY = 0.99
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_SHARPNESS = 3.0
_STEP = 0.03
_LARGEST_SURPRISE = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """The likeliest next tokens at one position, best first, and their scores; all are possible."""

    token_ids: list[int]
    scores: list[float]

    def index(self, token: int) -> int:
        """Return a token's rank, from 0; a token that is not listed gets the last rank."""
        return self.token_ids.index(token) if token in self.token_ids else len(self.token_ids) - 1


class Confidence:
    """How far to trust the draft's scores: P(token) ~ exp(sharpness * score), with a learned sharpness."""

    def __init__(self) -> None:
        self._sharpness = _PRIOR_SHARPNESS

    def weights(self, scores: Sequence[float]) -> list[float]:
        """Return unnormalised probabilities of tokens with these descending scores; that of the first is 1."""
        sharpness, best = self._sharpness, scores[0]
        return [math.exp(sharpness * (score - best)) for score in scores]

    def observe(self, scores: Sequence[float], committed: int) -> None:
        """Learn which token was committed (its rank), by a step up the gradient of its log probability."""
        weights = self.weights(scores)
        expected = sum(weight * score for weight, score in zip(weights, scores, strict=True)) / sum(weights)
        surprise = self._sharpness * (scores[committed] - expected)
        self._sharpness *= math.exp(_STEP * max(-_LARGEST_SURPRISE, min(_LARGEST_SURPRISE, surprise)))


class AcceptedLengths:
    """The distribution of the number of accepted draft tokens, over recent verdicts."""

    def __init__(self, num_draft_tokens: int) -> None:
        rate = _PRIOR_ACCEPTANCE
        self._weights = [rate**a * (1 - rate) for a in range(num_draft_tokens)] + [rate**num_draft_tokens]

    def observe(self, num_accepted: int, length: int) -> None:
        """Count a verdict; a short draft that was accepted whole says nothing about larger numbers."""
        last = num_accepted + 1 if num_accepted < length else len(self._weights)
        possible = [weight + 1e-9 for weight in self._weights[num_accepted:last]]
        scale = (1 - _DECAY) / sum(possible)
        self._weights = [_DECAY * weight for weight in self._weights]
        for a, weight in enumerate(possible, num_accepted):
            self._weights[a] += scale * weight

    def probabilities(self, length: int) -> list[float]:
        """Return P(exactly a accepted) for a draft of `length` tokens, [length + 1]."""
        length = min(length, len(self._weights) - 1)
        return [*self._weights[:length], sum(self._weights[length:])]

    def expected(self, length: int) -> float:
        """Return the number of accepted tokens to expect of a draft of `length` tokens."""
        return sum(a * probability for a, probability in enumerate(self.probabilities(length)))


def likeliest(
    outlook: Sequence[Options],
    drafted: Sequence[int],
    confidence: Confidence,
    lengths: Sequence[float] | None,
) -> list[tuple[int, int]]:
    """Return the likeliest verdicts, (accepted, token after them), the best first.

    Args:
        outlook: [length + 1] the likeliest tokens after each number of accepted tokens.
        drafted: [length] the draft; a draft token cannot be the token after its own rejection.
        lengths: [length + 1] the probability of each number of accepted tokens; None takes it from the scores.
    """
    verdicts: list[tuple[float, int, int]] = []
    reached = 1.0
    for accepted, options in enumerate(outlook):
        if not options.token_ids:
            break
        weights = dict(zip(options.token_ids, confidence.weights(options.scores), strict=True))
        kept = weights.pop(drafted[accepted], 0.0) if accepted < len(drafted) else 0.0
        rest = sum(weights.values())
        if rest:
            ends = reached * rest / (kept + rest) if lengths is None else lengths[accepted]
            verdicts += [(ends * weight / rest, accepted, token) for token, weight in weights.items()]
        reached *= kept / (kept + rest)
    verdicts.sort(key=itemgetter(0), reverse=True)
    return [(accepted, token) for _, accepted, token in verdicts]
