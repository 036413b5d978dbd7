"""Lessons: the committed texts that teach a draft and those that are held out, bounded, with a fair share per group.

Lessons that were taught are drawn upon again, all of them alike, so that a draft that meets another domain keeps the
former ones (experience replay).
"""

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from engine.protocols import Request

HELD_OUT = 8
"""One text of so many is never taught: candidates are judged on these."""
STEP_TOKENS = 640
"""New tokens that are learned in one step."""
REPLAYED_TOKENS = STEP_TOKENS // 2
"""Tokens of earlier lessons that are learned again in one step."""
MOST_REPLAYED = 256
"""Lessons that are kept to be learned again: a sample of all (reservoir sampling: Vitter 1985, algorithm R)."""
ROOM = 65_536
"""Tokens that are kept of texts to be taught; of held-out texts, an eighth."""
_MIN_TOKENS = 8
_PIECE = 256
"""Tokens that a lesson teaches at most, after as many tokens of context: so a pass stays short."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A piece of a committed text.

    Attributes:
        group: the group of requests whose texts are judged together.
        token_ids: its tokens; those from index `start` on are taught.
        first: the position of its first token in the whole text, which noise and rotations depend on.
        temperature, seed: those of the request.
    """

    group: str
    token_ids: list[int]
    start: int
    first: int
    temperature: float
    seed: int

    @property
    def size(self) -> int:
        """How many tokens it teaches."""
        return len(self.token_ids) - self.start


def lessons_of(request: Request) -> Iterator[Lesson]:
    """Cut an ended request's text into lessons; there are none if the text must not teach, or is no sample of its law.

    An audited text was given, not drawn, and biased or penalised logits are not the model's.
    """
    params, ids = request.params, request.token_ids
    is_changed = params.audits or params.has_penalties or params.logit_bias
    if params.learning_group is None or is_changed or request.num_output_tokens < _MIN_TOKENS or request.input_length:
        return
    for begin in range(request.prompt_length, len(ids), _PIECE):
        first = max(0, begin - _PIECE)
        tokens, start = ids[first : begin + _PIECE], begin - first
        yield Lesson(params.learning_group, tokens, start, first, params.temperature, params.seed or 0)


class Lessons:
    """What waits to be taught, and what is held out; each is cut where the largest group has its oldest lesson."""

    def __init__(self) -> None:
        self.waiting: list[Lesson] = []
        self.held_out: list[Lesson] = []
        self._taught: list[Lesson] = []
        self._num_taught = 0
        self._chance = random.Random(0)

    def add(self, request: Request) -> None:
        """Sort in an ended request: by its prompt and seed, all of its text is taught, or none; a first one is not."""
        key = repr((request.token_ids[: request.prompt_length], request.params.seed)).encode()
        is_first = all(lesson.group != request.params.learning_group for lesson in self.held_out)
        is_held_out = is_first or hashlib.sha256(key).digest()[0] % HELD_OUT == 0
        pile, room = (self.held_out, ROOM // HELD_OUT) if is_held_out else (self.waiting, ROOM)
        pile += lessons_of(request)
        while sum(lesson.size for lesson in pile) > room:
            sizes = Counter[str]()
            for lesson in pile:
                sizes[lesson.group] += lesson.size
            largest = max(sizes, key=lambda group: sizes[group])
            pile.remove(next(lesson for lesson in pile if lesson.group == largest))

    def take(self) -> list[Lesson]:
        """Take a step's lessons: new ones, the oldest first, of each group in turn, and earlier ones.

        There are none if too few tokens wait.
        """
        if sum(lesson.size for lesson in self.waiting) < STEP_TOKENS:
            return []
        turns = Counter[str]()

        def turn(lesson: Lesson) -> int:
            turns[lesson.group] += 1
            return turns[lesson.group]

        order = sorted(self.waiting, key=turn)
        sizes = accumulate(lesson.size for lesson in order)
        count = next(count for count, size in enumerate(sizes, 1) if size >= STEP_TOKENS)
        taken, self.waiting = order[:count], order[count:]
        replayed = self._replayed()
        for lesson in taken:
            self._num_taught += 1
            place = len(self._taught)
            if place == MOST_REPLAYED:
                place = self._chance.randrange(self._num_taught)
            self._taught[place : place + 1] = [lesson] if place < MOST_REPLAYED else []
        return taken + replayed

    def _replayed(self) -> list[Lesson]:
        self._chance.shuffle(self._taught)
        sizes = accumulate((lesson.size for lesson in self._taught), initial=0)
        return [lesson for lesson, before in zip(self._taught, sizes, strict=False) if before < REPLAYED_TOKENS]
