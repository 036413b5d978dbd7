"""HeadLearner: trains a copy of a trained head on lessons with features.

The target makes features, so what makes them is not learned. Drafts begin at many places of a lesson at once; each
teaches up to its first rejected token, because serving draws no later ones from the text's own tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.drafting.learning.learner import Learner, Score, Weights, rejection_loss
from engine.drafting.learning.lessons import Lesson
from engine.heads.head import NEVER, Head
from engine.heads.unrolling import unroll

_NO_TOKEN = -1


class HeadLearner(Learner):
    """Learns as `Learner` does, from drafts of the served length that follow each other."""

    def learn(self, lesson: Lesson, num_tokens: int) -> None:
        """Add a lesson's gradients, of the places at which a round would have compared a token; see `Learner.learn`."""
        scores, committed = self._scores(lesson, {})
        accepted = _accepted(scores, committed)
        is_taught = F.pad(accepted[:, :-1], (1, 0), value=1).bool() & (committed != _NO_TOKEN)
        torch.autograd.backward(rejection_loss(scores[is_taught], committed[is_taught]) / num_tokens)

    @torch.no_grad()
    def score(self, lesson: Lesson, weights: Weights) -> Score:
        """Tell how many draft tokens would be accepted with these weights, in drafts that follow each other."""
        accepted = _accepted(*self._scores(lesson, weights))
        return Score(int(accepted.sum()), len(accepted))

    def _scores(self, lesson: Lesson, weights: Weights) -> tuple[Tensor, Tensor]:
        """Return what each draft draws its tokens by, [drafts, places, vocab], and the text's [drafts, places] int64.

        Tokens that the head lacks, and places beyond the text, are `_NO_TOKEN`.
        """
        assert lesson.features is not None
        ids, features = torch.tensor(lesson.token_ids, device=self.device), lesson.features.to(self.device)
        length, num_places = len(ids), min(self._num_draft_tokens, self._module.config.max_draft_tokens)
        ids = F.pad(ids, (0, num_places))
        last = min(len(features), length - 2)
        starts = torch.arange(max(1, lesson.start - 1), last + 1, num_places, device=self.device)
        places = starts.unsqueeze(-1) + torch.arange(1, 1 + num_places, device=self.device)
        named = {f"head.{name}": weight for name, weight in weights.items()}
        inputs = ids[None], features[None], starts[None], num_places
        with self._numbers:
            logits: Tensor = torch.func.functional_call(_Unrolled(self._module), named, inputs)[0]
        committed = ids[places]
        is_drafted = logits.gather(-1, committed.unsqueeze(-1)).squeeze(-1) > NEVER / 2
        scores = self._noised(lesson, logits.flatten(0, 1), places.flatten()).view_as(logits)
        return scores, committed.where(is_drafted & (places < length), _NO_TOKEN)


class _Unrolled(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, *arguments: Any) -> Tensor:
        return unroll(self.head, *arguments).logits


def _accepted(scores: Tensor, committed: Tensor) -> Tensor:
    """Return 1 for each token of drafts that is accepted, else 0."""
    return (scores.argmax(-1) == committed).long().cumprod(-1)
