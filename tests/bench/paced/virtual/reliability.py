"""Reliability: how many draft tokens were accepted, by how likely the planner took that to be."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

from engine.control.survival import History, Prior, Survival
from engine.protocols import Draft

NUM_BINS = 10


@dataclass(slots=True)
class Reliability:
    """Predicted and actual acceptance, by bins of the prediction from 0 to 1; they only grow.

    Attributes:
        counts: [10] decided draft tokens whose acceptance, given that of their parents, was predicted to be in the bin.
        predicted: [10] the sums of their predictions.
        accepted: [10] how many of them were accepted.
    """

    counts: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    accepted: list[int] = field(default_factory=lambda: [0] * NUM_BINS)

    def observe(self, predicted: float, *, accepted: bool) -> None:
        """Count one draft token."""
        place = min(int(NUM_BINS * predicted), NUM_BINS - 1)
        self.counts[place] += 1
        self.predicted[place] += predicted
        self.accepted[place] += accepted

    @property
    def error(self) -> float:
        """The mean distance of predicted and actual acceptance over bins, weighted by their counts."""
        distances = (abs(sure - kept) for sure, kept in zip(self.predicted, self.accepted, strict=True))
        return sum(distances) / max(1, sum(self.counts))


class WatchedSurvival(Survival):
    """Learns as any other, and records its predictions for the tokens of chains that are decided."""

    def __init__(self, prior: Prior) -> None:
        super().__init__(prior)
        self.reliability = Reliability()

    def observe(self, history: History, draft: Draft, path: Sequence[int]) -> None:
        for place in range(min(len(path) + 1, len(draft.token_ids))):
            odds = history.places[min(place, len(history.places) - 1)] + history.offset.value
            self.reliability.observe(1 / (1 + exp(-odds)), accepted=place < len(path))
        super().observe(history, draft, path)
