"""The curve: tokens a pass over traffic, of a study that drafts for it and learns from it, and of the frozen draft.

Rounds are decided by the target's text (see `engine.training.measured_acceptance`), so no target computes here. The
study's weights take over, are watched and undone as in a draft worker, but between two texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from engine.config import ModelConfig
from engine.drafting.learning.learner import Learner, Weights
from engine.drafting.learning.lessons import lessons_of
from engine.drafting.learning.study import Study
from engine.execution.registry import make_backend
from engine.models.loader import load_model
from engine.models.registry import open_model
from engine.protocols import Draft, ProposeRow, Request
from engine.training.measured_acceptance import Acceptance

WINDOW_TOKENS = 5000


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens a pass in a stretch of the traffic that ends after `num_tokens` tokens, and whether a swap was in it."""

    domain: str
    num_tokens: int
    frozen: float
    learning: float
    num_swaps: int

    @property
    def gain(self) -> float:
        """The tokens a pass over those of the frozen draft."""
        return self.learning / self.frozen


class Follower:
    """A study that meets texts, and the weights that it serves."""

    def __init__(self, draft: Path, k: int, path: Path | None = None) -> None:
        """Learn, and keep at `path` what was learned, if there is one."""
        source = open_model(ModelConfig(str(draft), device="cpu", dtype="float32"))
        self.learner = Learner(make_backend(load_model(source), source), k)
        self.study, self.k = Study(self.learner, path=path, draft=source.digest), k
        self.study.lessons.salt = b""
        self.served: Weights = self.learner.loaded

    def gain(self, texts: Sequence[Request]) -> float:
        """Return the tokens a pass with the served weights over those with the frozen ones, on texts never met."""
        weights = self.served, self.learner.loaded
        served, frozen = (self._tokens_a_pass([self._agreements(text, its) for text in texts]) for its in weights)
        return served / frozen

    def meet(self, domain: str, texts: Sequence[Request], seen: int = 0) -> Iterator[Window]:
        """Draft for texts, and learn from each when it has ended."""
        frozen, learning, begin, num_swaps = list[list[bool]](), list[list[bool]](), seen, 0
        for text in texts:
            seen += text.num_output_tokens
            frozen.append(self._agreements(text, self.learner.loaded))
            learning.append(self._agreements(text, self.served))
            num_swaps += self._draft_and_learn(text, learning[-1])
            if seen - begin >= WINDOW_TOKENS or text is texts[-1]:
                yield Window(domain, seen, self._tokens_a_pass(frozen), self._tokens_a_pass(learning), num_swaps)
                frozen, learning, begin, num_swaps = [], [], seen, 0

    def _tokens_a_pass(self, agreements: Sequence[Sequence[bool]]) -> float:
        return Acceptance.of_agreements(agreements).mean_acceptance_length(self.k)

    def _draft_and_learn(self, text: Request, agreements: Sequence[bool]) -> bool:
        """Return whether other weights took over after this text."""
        for round_ends in pairwise(self._round_ends(text, agreements)):
            self._watch(text, *round_ends)
        self.study.ended(text)
        for _ in self.study.work():
            pass
        if (weights := self.study.taken()) is None:
            return False
        self.served = weights
        self.study.keep()
        return True

    def _round_ends(self, text: Request, agreements: Sequence[bool]) -> list[int]:
        (lengths,) = Acceptance.of_agreements([agreements]).lengths
        ends = [text.prompt_length]
        while ends[-1] < len(text.token_ids):
            ends.append(ends[-1] + min(self.k, lengths[ends[-1] - text.prompt_length]) + 1)
        return ends

    def _watch(self, text: Request, begin: int, end: int) -> None:
        """Let the study's watch see the round of a text that committed its tokens from `begin` to `end`."""
        so_far = text.copy()
        del so_far.token_ids[begin:]
        drafted = text.token_ids[begin : begin + self.k]
        wrong = slice(end - begin - 1, end - begin)
        drafted[wrong] = [-1] * len(drafted[wrong])
        self.study.watch.observe([so_far])
        self.study.watch.drafted([ProposeRow(so_far, self.k)], [Draft(drafted, [*range(-1, len(drafted) - 1)])])

    def _agreements(self, text: Request, weights: Weights) -> list[bool]:
        return [agrees for lesson in lessons_of(text) for agrees in self.learner.agreements(lesson, weights)]
