"""Lessons: the committed texts that teach a draft and those that are held out, bounded, with a fair share per group.

Lessons that were taught are drawn upon again, all of them alike, so that a draft that meets another domain keeps the
former ones (experience replay).
"""

import hashlib
import random
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

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
FEATURE_BYTES = 2**30
"""Bytes that features may take of texts that wait to be cut; as many of those to be taught, held out, and kept."""
_MIN_TOKENS = 8
_MOST_GROUPS = 16
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
        features: what a head reads of its first tokens, [known, state_size]; None for a whole model.
    """

    group: str
    token_ids: list[int]
    start: int
    first: int
    temperature: float
    seed: int
    features: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its features."""
        return 0 if self.features is None else self.features.nbytes

    @property
    def size(self) -> int:
        """How many tokens it teaches."""
        return len(self.token_ids) - self.start


def may_teach(request: Request) -> bool:
    """Return whether an ended request's text may teach, and is a sample of the model's law.

    An audited text was given, not drawn, and biased, penalised or forbidden logits are not the model's. What `top_p`,
    `top_k` and `min_p` cut off is left out of account.
    """
    params = request.params
    is_changed = params.audits or params.depends_on_path or params.logit_bias or params.min_tokens
    is_long = request.num_output_tokens >= _MIN_TOKENS
    return params.learning_group is not None and not is_changed and not request.input_length and is_long


def first_read(request: Request) -> int:
    """Return the place of the first token that its lessons hold."""
    return max(0, request.prompt_length - _PIECE)


def lessons_of(request: Request, features: Tensor | None = None) -> Iterator[Lesson]:
    """Cut an ended request's text into lessons, if it may teach.

    features: what a head reads of the tokens from `first_read` on; without those before a draft, it teaches nothing.
    """
    params, ids = request.params, request.token_ids
    if params.learning_group is None or not may_teach(request):
        return
    for begin in range(request.prompt_length, len(ids), _PIECE):
        first = max(0, begin - _PIECE)
        tokens, start = ids[first : begin + _PIECE], begin - first
        read, offset = None, first - first_read(request)
        if features is not None:
            read = features[offset : offset + len(tokens) - 1].clone()  # so that the others are freed
            if len(read) < max(1, start - 1):
                return
        yield Lesson(params.learning_group, tokens, start, first, params.temperature, params.seed or 0, read)


class Lessons:
    """What waits to be taught, and what is held out; each is cut where the largest group has its oldest lesson."""

    def __init__(self) -> None:
        self.waiting: list[Lesson] = []
        self.held_out: list[Lesson] = []
        self.salt = secrets.token_bytes(8)
        """So that no client chooses what is held out."""
        self._taught: list[Lesson] = []
        self._num_taught = 0
        self._chance = random.Random(0)

    def add(self, request: Request, features: Tensor | None = None) -> None:
        """Sort in an ended request: by its prompt and seed, all of its text is taught, or none.

        One of each group is not, as far as these groups are few.
        """
        key = repr((request.token_ids[: request.prompt_length], request.params.seed)).encode()
        groups = {lesson.group for lesson in self.held_out}
        is_first = len(groups) < _MOST_GROUPS and request.params.learning_group not in groups
        is_held_out = is_first or hashlib.sha256(self.salt + key).digest()[0] % HELD_OUT == 0
        pile, room = (self.held_out, ROOM // HELD_OUT) if is_held_out else (self.waiting, ROOM)
        pile += lessons_of(request, features)
        while sum(lesson.size for lesson in pile) > room or sum(lesson.num_bytes for lesson in pile) > FEATURE_BYTES:
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
            if len(self._taught) < MOST_REPLAYED:
                self._taught.append(lesson)
            elif (place := self._chance.randrange(self._num_taught)) < MOST_REPLAYED:
                self._taught[place] = lesson
        while sum(lesson.num_bytes for lesson in self._taught) > FEATURE_BYTES:
            del self._taught[self._chance.randrange(len(self._taught))]
        return taken + replayed

    def _replayed(self) -> list[Lesson]:
        self._chance.shuffle(self._taught)
        sizes = accumulate((lesson.size for lesson in self._taught), initial=0)
        return [lesson for lesson, before in zip(self._taught, sizes, strict=False) if before < REPLAYED_TOKENS]
