"""What a draft that learns brings to the groups of a pool, and what its learning costs them.

**The assumption:** while a learning pass runs, draft passes stand still, even one that was there first. A GPU that does
both at once finishes no later than that, unless they disturb each other.

The product's `Study` decides when a pass of which lesson is due. The pass takes what the roofline says of the named
draft, and what the learner's operations move. All lessons are of texts of the groups themselves.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.drafting.learning.learner import Score, Weights
from engine.drafting.learning.lessons import Lesson
from engine.drafting.learning.study import JUDGED_EVERY, Study
from engine.params import SamplingParams
from engine.protocols import Request
from tests.bench.paced.group import Stretch
from tests.bench.paced.roofline import PacedDevice, Pair, Work
from tests.bench.paced.virtual.measures import Bench, Timed, check_texts, time_arm
from tests.bench.paced_device import Accelerator

_LESSON_BYTES = 24
"""Moved for each learned weight in a lesson: a 16-bit copy (6), its gradient in float32 (6), and adding that (12)."""
_STEP_BYTES = 52
"""Moved for each learned weight in a step: clipping (12), AdamW (28), and the moving average (12)."""
_LOGIT_BYTES = 280
"""Moved for each logit of a lesson: 35 operations read and write 4 bytes, most of them to make the noise."""
_NO_TIME_S = 1e-9


class CostsOfLearning:
    """Stands for a `Learner`: it learns nothing, and adds up the `seconds` that the named draft would take."""

    def __init__(self, draft: PacedDevice) -> None:
        self.seconds, self.loaded = 0.0, dict[str, Any]()
        self._draft, self._bandwidth = draft, draft.num_gpus * draft.hardware.bytes_per_s

    def learn(self, lesson: Lesson, num_tokens: int) -> None:
        # The backward pass multiplies twice as much as the forward pass.
        self._compute(lesson, 3, _LESSON_BYTES)

    def end_step(self) -> None:
        self.seconds += _STEP_BYTES * self._draft.model.layer_weights / self._bandwidth

    def candidate(self) -> Weights:
        return self.loaded

    def score(self, lesson: Lesson, weights: Weights) -> Score:
        """Find all weights alike, so that none take over."""
        self._compute(lesson, 1, 0)
        return Score(0, lesson.size)

    def _compute(self, lesson: Lesson, num_passes: int, bytes_per_weight: int) -> None:
        model, length = self._draft.model, len(lesson.token_ids)
        num_logits = lesson.size * model.head_weights / model.hidden_size
        num_bytes = bytes_per_weight * model.layer_weights + _LOGIT_BYTES * num_logits
        work = Work(length, lesson.size, num_context_tokens=0, num_attended=length**2)
        self.seconds += num_passes * self._draft.pass_seconds(work) + num_bytes / self._bandwidth


class LearningAccelerator(Accelerator):
    """A GPU that drafts, and learns besides; see the module for what happens where both meet.

    Attributes:
        study: the product's, in the time of its own thread.
        learning_s: seconds of learning passes so far, of which `busy_s` has none.
    """

    def __init__(self, learner: Any, texts: Sequence[Request], share: float = 0.5) -> None:
        """Learn from these texts again and again, with other seeds."""
        super().__init__()
        self.learning_s = self._now = self._drafted_s = 0.0
        self.study = Study(learner, share=share, drafted_s=lambda: self._drafted_s, clock=lambda: self._now)
        self._learner, self._texts = learner, texts
        self._since, self._spent_s = (0.0, 0.0), 0.0
        self._passes = self._learn()

    def launch(self, now: float, seconds: float) -> float:
        begins = arrives = max(now, self.idle_from)
        while self._now < begins + seconds:
            if (pause_s := self.study.pause_s(self._spent_s, self._since)) > _NO_TIME_S:
                self._now += pause_s
                continue
            self._since, self._spent_s = (self._now, self._drafted_s), next(self._passes)
            ends = self._now + self._spent_s
            begins += max(0.0, ends - max(self._now, begins))
            self._now = ends
        self._drafted_s += begins + seconds - arrives  # as the product counts it, with what a draft waits
        return super().launch(begins, seconds)

    def _learn(self) -> Iterator[float]:
        """Learn without end, and yield the seconds of each pass."""
        for seed in itertools.count():
            for text in self._texts:
                self.study.ended(replace(text, params=replace(text.params, seed=seed)))
            for _ in self.study.work():
                seconds, self._learner.seconds = self._learner.seconds, 0.0
                self.learning_s += seconds
                yield seconds

    def tokens_per_s(self) -> float:
        """Return the tokens that are learned in a second of learning passes, by learning on: timing ends before."""
        counts = self.study.counts
        tokens, steps, learning_s = counts["tokens"], counts["steps"], self.learning_s
        while counts["steps"] < steps + 2 * JUDGED_EVERY:
            next(self._passes)
        return (counts["tokens"] - tokens) / (self.learning_s - learning_s)


@dataclass(frozen=True, slots=True)
class Learning:
    """One arm.

    Attributes:
        gain: tokens/s over those of the frozen draft.
        drafts, learns: shares of the time in which the draft GPU does so.
        learned_per_s: tokens that are learned in a second of learning passes, judgements included.
    """

    name: str
    timed: Timed
    gain: float
    drafts: float
    learns: float = 0.0
    learned_per_s: float = 0.0


def learning(bench: Bench, setting: Mapping[str, Any], frozen: Weights, learned: Weights) -> Iterator[Learning]:
    """Time the frozen draft, the same while it learns, and the learned one, which learns on; `setting` as `time_arm`.

    Raises RuntimeError if the arms' texts differ.
    """

    def time_with(weights: Weights, gpu: Accelerator) -> tuple[Timed, list[Stretch]]:
        bench.models.draft.assign(weights)
        return time_arm(bench, **setting, make_gpu=lambda: gpu)

    gpu = Accelerator()
    base, stretches = time_with(frozen, gpu)
    yield Learning("frozen", base, 1.0, gpu.busy_s / gpu.idle_from)
    params = SamplingParams(temperature=setting["temperatures"][0], learning_group="")
    outputs = [text for stretch in stretches for text in stretch.texts.values()]
    texts = [  # only their lengths matter
        Request("", [*prompt, *text], len(prompt), params)
        for prompt, text in zip(itertools.cycle(bench.prompts), outputs, strict=False)
    ]
    for name, weights in (("frozen, learns", frozen), ("learned, learns on", learned)):
        learner = LearningAccelerator(CostsOfLearning(Pair.of(base.pair).draft), texts)
        timed, others = time_with(weights, learner)
        check_texts(stretches, others)
        shares = learner.busy_s / learner.idle_from, learner.learning_s / learner.idle_from
        yield Learning(name, timed, timed.tokens_per_s / base.tokens_per_s, *shares, learner.tokens_per_s())
