"""Predicted speed-ups: is a draft worth its time, and how many tokens should it draft?

`c` is t_draft / t_target, `alpha` the chance that a draft token is accepted, `k` the number of draft tokens.

- Leviathan, Kalman and Matias (https://arxiv.org/abs/2211.17192), Theorem 3.8: acceptance independent from token to
  token, and a target pass over k + 1 tokens that costs as much as one over a single token.
- The run-ahead bound: drafting wholly hidden behind the target's pass as long as k + 1 draft steps fit into it, which
  is the most that drafting ahead can gain over drafting in turn, a factor of 1 + k c.
"""

from dataclasses import dataclass

from engine.training.acceptance import Acceptance

MAX_K = 12


@dataclass(frozen=True)
class Prediction:
    """What drafting k tokens would bring over plain decoding."""

    k: int
    mean_acceptance_length: float
    speedup: float
    run_ahead_bound: float


def expected_length(alpha: float, k: int) -> float:
    """Tokens per round under independent acceptance: (1 - alpha^(k + 1)) / (1 - alpha)."""
    return float(k + 1) if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def theorem_3_8(alpha: float, k: int, c: float) -> float:
    """Speed-up over plain decoding with the draft in turn with the target."""
    return expected_length(alpha, k) / (1 + k * c)


def run_ahead_bound(alpha: float, k: int, c: float) -> float:
    """Speed-up over plain decoding if every draft were ready when the target is."""
    return expected_length(alpha, k) / max(1.0, (k + 1) * c)


def predict(acceptance: Acceptance, c: float, max_k: int = MAX_K) -> list[Prediction]:
    """Predict for each k from 1; the mean acceptance length is measured, not from alpha."""
    alpha = acceptance.rate()
    return [
        Prediction(
            k,
            acceptance.mean_acceptance_length(k),
            theorem_3_8(alpha, k, c),
            run_ahead_bound(alpha, k, c),
        )
        for k in range(1, max_k + 1)
    ]


def best(predictions: list[Prediction]) -> Prediction:
    """Return the k with the highest predicted speed-up."""
    return max(predictions, key=lambda prediction: prediction.speedup)
