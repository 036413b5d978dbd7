"""How many next tokens to prepare for after each number of accepted draft tokens.

Kumar, Dao and May, "Speculative Speculative Decoding" (2603.03251), Theorem 12: if the next token is missed with
probability F^-r after F guesses, the fan-outs that miss least under a budget are proportional to P(a)^(1 / (1 + r)),
where P(a) is the probability that exactly a tokens are accepted. P is measured here instead of taken as geometric,
which is the same thing where acceptance is the same at every position.
"""

from collections.abc import Sequence

MISS_EXPONENT = 1.0
_DECAY = 0.99
_PRIOR_ACCEPTANCE = 0.7


class AcceptedLengths:
    """How often exactly a tokens of a draft were accepted, lately."""

    def __init__(self, num_draft_tokens: int) -> None:
        rate = _PRIOR_ACCEPTANCE
        self._weights = [rate**a * (1 - rate) for a in range(num_draft_tokens)] + [rate**num_draft_tokens]

    def observe(self, num_accepted: int, length: int) -> None:
        """Count a verdict; a short draft that was accepted whole leaves open what lies beyond its end."""
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


def fan_out(probabilities: Sequence[float], budget: int) -> list[int]:
    """Share out `budget` guesses, at least one for each accepted length if there are so many.

    Args:
        probabilities: P(exactly a accepted), for a = 0 to the draft's length.
    """
    weights = [max(probability, 1e-9) ** (1 / (1 + MISS_EXPONENT)) for probability in probabilities]
    scale = max(0, budget - len(weights)) / sum(weights)
    shares = [1 + scale * weight for weight in weights]
    counts = [int(share) for share in shares]
    largest_fraction_first = sorted(range(len(counts)), key=lambda a: counts[a] - shares[a])
    for a in largest_fraction_first[: budget - sum(counts)]:
        counts[a] += 1
    while sum(counts) > budget:
        likeliest_last = min((a for a in range(len(counts)) if counts[a]), key=lambda a: weights[a])
        counts[likeliest_last] -= 1
    return counts
