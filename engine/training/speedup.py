"""Predicts the speed-up of a pair for each number of draft tokens.

`c` is t_draft / t_target, `alpha` the probability that a draft token is accepted, `k` the number of draft tokens.

- Leviathan, Kalman and Matias (https://arxiv.org/abs/2211.17192), Theorem 3.8, assumes that tokens are accepted
  independently, and that a target pass over k + 1 tokens takes as long as a pass over one.
- The run-ahead bound assumes that drafting is hidden behind the target's pass while k + 1 draft steps fit into it. This
  is at most a factor of 1 + k c over drafting in turn.
"""

from dataclasses import dataclass

from engine.training.acceptance import Acceptance

MAX_K = 12


@dataclass(frozen=True)
class Prediction:
    """Predicted figures for k draft tokens."""

    k: int
    mean_acceptance_length: float
    speedup: float
    run_ahead_bound: float


def expected_length(alpha: float, k: int) -> float:
    """Return tokens per round under independent acceptance: (1 - alpha^(k + 1)) / (1 - alpha)."""
    return float(k + 1) if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def theorem_3_8(alpha: float, k: int, c: float) -> float:
    """Return the speed-up over plain decoding when draft and target take turns."""
    return expected_length(alpha, k) / (1 + k * c)


def run_ahead_bound(alpha: float, k: int, c: float) -> float:
    """Return the speed-up over plain decoding if drafting runs while the target verifies."""
    return expected_length(alpha, k) / max(1.0, (k + 1) * c)


def predict(acceptance: Acceptance, c: float, max_k: int = MAX_K) -> list[Prediction]:
    """Return predictions for k = 1 to `max_k`; mean acceptance lengths are measured, not derived from alpha."""
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
    """Return the prediction with the highest speed-up."""
    return max(predictions, key=lambda prediction: prediction.speedup)
