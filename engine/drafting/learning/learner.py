"""Learner: trains a copy of the draft on lessons, and tells what weights would be worth.

The target's token is a function of its logits and of noise that the draft draws with, too. So one text shows at every
place whether the draft would have been accepted, and which logits were too low: nothing but tokens has to travel.
"""

import copy
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.drafting.learning.lessons import Lesson
from engine.drafting.learning.whole_text import WholeText
from engine.errors import ModelError
from engine.execution.backend import Backend
from engine.models.causal_lm import forward
from engine.sampling import noise

Weights = Mapping[str, Tensor]
"""Weights by the names of the draft's parameters, in the numbers in which they are served."""

RATE = 0.05
"""AdamW's learning rate, times the hidden size: a wider layer adds up more changes."""
_SLOWEST = 1 / 9
"""The smallest factor of the rate, which falls when weights get worse."""
_AVERAGED_STEPS = 10
"""Time constant of the moving average over steps that weights are judged and served by."""


class Score(NamedTuple):
    """The accepted tokens of drafts that begin at each place of a lesson, in sum."""

    accepted: int
    places: int


class Learner:
    """Trains all but the embedding and the output layer, in float32, with an optimiser of its own."""

    def __init__(self, backend: Backend, num_draft_tokens: int) -> None:
        """Copy the served model, before it is compiled; raise ModelError if it cannot learn."""
        served: Any = backend.model.module
        tables = [served.get_input_embeddings(), served.get_output_embeddings()]
        frozen = {id(weight): weight for table in tables for weight in table.parameters()}
        self.device, self._num_draft_tokens = backend.device, num_draft_tokens
        self._module: Any = copy.deepcopy(served, dict(frozen))
        for layer in self._module.modules():
            if isinstance(layer, nn.Linear):
                layer.__class__ = nn.Linear  # kernels of ours have no gradients
            elif hasattr(layer, "in_features"):
                raise ModelError(f"{backend.info.name} cannot learn: its weights are quantised or packed")
        learned = {name: weight for name, weight in self._module.named_parameters() if id(weight) not in frozen}
        self._formats = {name: (_number_format(weight), weight.dtype) for name, weight in learned.items()}
        self._learned = {name: weight.requires_grad_() for name, weight in learned.items()}
        for weight in self._learned.values():
            weight.data = weight.data.float()
        self._numbers = torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")
        self._factor, self._width = 1.0, served.get_input_embeddings().weight.shape[1]
        self.loaded = self._rounded({name: weight.detach() for name, weight in self._learned.items()})
        self.restart(self.loaded)
        try:
            features = None if backend.model.head is None else torch.zeros(2, backend.model.head.state_size)
            self.learn(Lesson("", [0, 1, 2], 1, 0, 1.0, 0, features), 1)
        except Exception as error:
            raise ModelError(f"{backend.info.name} cannot learn: {error}") from error
        self._optimizer.zero_grad()

    def restart(self, weights: Weights) -> None:
        """Go on from these weights, with a new optimiser."""
        for name, weight in self._learned.items():
            weight.data.copy_(weights[name])
        self._average = {name: weight.detach().clone() for name, weight in self._learned.items()}
        rate = RATE / self._width * self._factor
        self._optimizer = torch.optim.AdamW(self._learned.values(), rate, (0.9, 0.99), weight_decay=0.0, fused=True)
        self._num_steps = 0

    def change_rate(self, factor: float) -> None:
        """Multiply the learning rate, within its bounds; it holds from the next `restart` on."""
        self._factor = min(1.0, max(_SLOWEST, self._factor * factor))

    def learn(self, lesson: Lesson, num_tokens: int) -> None:
        """Add a lesson's gradients to those of a step of `num_tokens` tokens."""
        scores, committed = self._scores(lesson, {})
        torch.autograd.backward(rejection_loss(scores, committed) / num_tokens)

    def end_step(self) -> None:
        """Change the weights by the gradients of the lessons since the last step."""
        nn.utils.clip_grad_norm_(self._learned.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_steps += 1
        share = max(1 / _AVERAGED_STEPS, 1 / self._num_steps)
        with torch.no_grad():
            for name, weight in self._learned.items():
                self._average[name].lerp_(weight, share)

    def candidate(self) -> Weights:
        """Return the learned weights, as they would be served."""
        return self._rounded(self._average)

    def score(self, lesson: Lesson, weights: Weights) -> Score:
        """Tell how many draft tokens would be accepted with these weights, beginning at each place of a lesson."""
        agrees = self.agreements(lesson, weights)
        runs = accumulate(reversed(agrees), lambda run, is_same: (run + 1) * is_same, initial=0)
        return Score(sum(min(run, self._num_draft_tokens) for run in runs), len(agrees))

    @torch.no_grad()
    def agreements(self, lesson: Lesson, weights: Weights) -> list[bool]:
        """Tell for each token that a lesson teaches whether a draft with these weights would be that token."""
        scores, committed = self._scores(lesson, weights)
        agrees: list[bool] = (scores.argmax(-1) == committed).tolist()
        return agrees

    def _scores(self, lesson: Lesson, weights: Weights) -> tuple[Tensor, Tensor]:
        """Return what the draft draws the taught tokens by, [n, vocab], and these tokens, [n] int64."""
        ids = torch.tensor(lesson.token_ids, device=self.device)
        places = torch.arange(len(ids) - 1, device=self.device)

        def call(**arguments: Any) -> Any:
            return torch.func.functional_call(self._module, dict(weights), (), arguments)

        module: Any = call
        with self._numbers:
            logits = forward(module, ids[:-1], places + lesson.first, places[lesson.start - 1 :], WholeText())
        return self._noised(lesson, logits, places[lesson.start - 1 :] + 1), ids[lesson.start :]

    def _noised(self, lesson: Lesson, logits: Tensor, places: Tensor) -> Tensor:
        """Return what tokens at these places of a lesson are drawn by, [n, vocab]; logits: [n, vocab]."""
        if not lesson.temperature:
            return logits.float()
        positions = (places + lesson.first).tolist()
        keys = noise.keys([lesson.seed] * len(positions), positions, noise.TARGET_STREAM, self.device)
        ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=self.device)
        # Not `gumbel`, whose compiled form another thread would wait for.
        return logits.float() / lesson.temperature + noise.plain_gumbel(keys, ids)

    def _rounded(self, weights: Weights) -> Weights:
        rounded = {}
        for name, (narrow, served) in self._formats.items():
            rounded[name] = weights[name].to(narrow).to(served, copy=True)
        return rounded


def rejection_loss(scores: Tensor, committed: Tensor) -> Tensor:
    """Return, in sum, by how much the draws of noised `scores` [n, vocab] beat the `committed` tokens [n].

    It is 0 where the draft was accepted. The expected gradient is that of KL(target || draft), so a draft that fits is
    left alone; a cross-entropy of scores learns faster from far away, but spoils a draft that fits.
    """
    drawn: Tensor = scores.amax(-1) - scores.gather(-1, committed.unsqueeze(-1)).squeeze(-1)
    return drawn.sum()


def accepted_tokens(scores: Iterable[Score]) -> float:
    """Return the expected tokens that a draft adds, on texts with these scores."""
    accepted, places = map(sum, zip(*scores, strict=True))
    return accepted / places


def _number_format(weight: Tensor) -> torch.dtype:
    """Return the numbers that a matrix is served in: 16-bit ones if these hold it, as CPUs then read them."""
    halves = (dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(weight.to(dtype).float(), weight))
    return next(halves, weight.dtype) if weight.ndim == 2 else weight.dtype
