"""Study: learns in a thread of its own while the draft worker is idle, and offers weights to the thread that drafts.

The thread that drafts only appends texts, with a head's features, and looks at `offer`. It alone changes the served
weights.
"""

import glob
import logging
import math
import os
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from engine.drafting.learning.learner import Learner, Score, Weights, accepted_tokens
from engine.drafting.learning.lessons import FEATURE_BYTES, Lesson, Lessons, first_read, may_teach
from engine.drafting.learning.swap_watch import SwapWatch
from engine.errors import ModelError
from engine.protocols import Request

logger = logging.getLogger(__name__)

JUDGED_EVERY = 16
"""Steps between two judgements."""
MIN_HELD_OUT = 8
"""Lessons that must be held out before weights are judged."""
_SMALL_GROUP = 4
"""Groups with fewer lessons are judged together."""
_SURE = 2.0
"""By how many standard errors new weights must be better, or worse."""
_TOLERATED = 0.01
"""The loss of tokens a pass, against the served and the loaded weights, that a group is not protected from."""
_SLOWER, _FASTER = 1 / 3, 3.0
"""Factors of the learning rate after weights that were worse, and better."""
_SWITCH_S = 200e-6
"""How long the thread that drafts waits for Python code of this one; by default 5 ms."""
_INBOX = 256
_IDLE_S = 0.05
_DRAFT, _TEMPORARY = "draft", ".unfinished"


class Study:
    """What a draft learns, and when new weights take over. Its own thread calls its methods, unless they say otherwise.

    Attributes:
        inbox: ended requests and their features, of which the oldest are lost if there are too many.
        offer: weights to take over between two proposals; the thread that drafts takes them by `taken`.
        counts: what `/metrics` shows, by name.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        share: float = 0.5,
        path: Path | None = None,
        draft: str = "",
        drafted_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Learn in a `share` of the time in which nothing is drafted; `drafted_s` counts the seconds of drafting.

        What was learned is kept at `path`. Raises ModelError if that file is of another `draft`.
        """
        self.inbox: deque[tuple[Request, Tensor | None]] = deque(maxlen=_INBOX)
        self.lessons = Lessons()
        self.watch = SwapWatch()
        self.counts: dict[str, float] = dict.fromkeys(("tokens", "steps", "taken", "dropped", "undone"), 0)
        self.counts |= {"accepted_before": 0.0, "accepted_after": 0.0}
        self._learner, self._share, self._path, self._draft = learner, share, path, draft
        self._drafted_s, self._clock = drafted_s, clock
        self._served = self._former = learner.loaded
        self.offer = None if path is None or not path.exists() else self._read(path)
        if self.offer is not None:
            learner.restart(self.offer)
        self._loaded: dict[Lesson, Score] = {}
        """What held-out lessons score with the loaded weights."""
        self._has_changed, self._was_undone = False, False
        self._is_closed = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="learning", daemon=True).start()

    def close(self) -> None:
        """End the thread after its pass; callable from any thread."""
        self._is_closed.set()

    def taken(self) -> Weights | None:
        """Return weights to take over now: what is offered, or the former ones if the last swap was bad.

        Only for the thread that drafts.
        """
        weights = self.offer
        if weights is not None:
            self._former, self._served = self._served, weights
            self.counts["taken"] += 1
            self.watch.begin()
            self.offer = None  # last, because `_judge` waits for it
        elif self.watch.is_bad():
            self._was_undone = True
            weights = self._served = self._former
            self.counts["undone"] += 1
            logger.info("Undid a swap of learned weights: fewer draft tokens were accepted")
        else:
            return None
        self._has_changed = True
        return weights

    def work(self) -> Iterator[None]:
        """Learn what is there, pass by pass; yields after each."""
        while lessons := self._next_lessons():
            if self._was_undone:
                self._was_undone = False
                self._learner.restart(self._served)  # no slower, because traffic that changed looks like a bad swap
            num_tokens = sum(lesson.size for lesson in lessons)
            for lesson in lessons:
                self._learner.learn(lesson, num_tokens)
                yield
            self._learner.end_step()
            yield
            self.counts["tokens"] += num_tokens
            self.counts["steps"] += 1
            if self.counts["steps"] % JUDGED_EVERY == 0:
                yield from self._judge()

    def ended(self, request: Request, features_of: Callable[[str, int], Tensor] | None = None) -> None:
        """Take an ended request's text; `features_of` has its features. Only for the thread that drafts."""
        self.watch.release(request.request_id)
        num_bytes = sum(features.nbytes for _, features in tuple(self.inbox) if features is not None)
        if may_teach(request) and num_bytes < FEATURE_BYTES:
            features = features_of and features_of(request.request_id, first_read(request))
            self.inbox.append((request, features))

    def pause_s(self, spent_s: float, since: tuple[float, float]) -> float:
        """Return how long to pause after a pass of `spent_s`, so that it has taken its share of the time `since` then.

        `since`: the time, and the seconds of drafting until then.
        """
        idle_s = self._clock() - since[0] - (self._drafted_s() - since[1])
        return spent_s / self._share - idle_s

    def _next_lessons(self) -> list[Lesson]:
        while self.inbox:
            self.lessons.add(*self.inbox.popleft())
        return self.lessons.take()

    def _judge(self) -> Iterator[None]:
        held_out = list(self.lessons.held_out)
        is_early = len(held_out) < MIN_HELD_OUT or self._was_undone
        if is_early or self.offer is not None or self.watch.is_watching:
            return
        candidate, scores = self._learner.candidate(), defaultdict[str, list[Score]](list)
        for name, weights in (("served", self._served), ("candidate", candidate)):
            for lesson in held_out:
                scores[name].append(self._learner.score(lesson, weights))
                yield
        for lesson in [lesson for lesson in held_out if lesson not in self._loaded]:
            self._loaded[lesson] = self._learner.score(lesson, self._learner.loaded)
            yield
        self._loaded = {lesson: self._loaded[lesson] for lesson in held_out}
        outcome = judge(self._loaded, scores["served"], scores["candidate"])
        if outcome is None:
            return
        loaded, served, after = map(accepted_tokens, (self._loaded.values(), scores["served"], scores["candidate"]))
        logger.info("Learned weights would add %.2f tokens a draft, the served ones %.2f: %s", after, served, outcome)
        if outcome != "taken":
            self.counts[outcome] += 1
            candidate = self._served if outcome == "dropped" else self._learner.loaded
            self._start_again(candidate)
            if outcome == "dropped":
                return
        else:
            self._learner.change_rate(_FASTER)
            self.counts |= {"accepted_before": loaded, "accepted_after": after}
        self.offer = candidate

    def _start_again(self, weights: Weights) -> None:
        self._learner.change_rate(_SLOWER)
        self._learner.restart(weights)

    def _run(self) -> None:
        try:
            # Only on Linux has a thread a policy of its own; with a nice value others wait 3 ms for it.
            if sys.platform == "linux":
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError as error:
            logger.warning("Learning takes time from other threads: %s", error)
        sys.setswitchinterval(_SWITCH_S)
        torch.set_num_threads(1)
        is_cuda = self._learner.device.type == "cuda"
        stream = torch.cuda.Stream(self._learner.device) if is_cuda else None  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(stream):
                while not self._is_closed.is_set():
                    self._study()
        except Exception:  # drafting goes on with the weights that it has
            logger.exception("Learning has ended")

    def _study(self) -> None:
        """Learn what is there, with pauses; wait for more."""
        since = self._clock(), self._drafted_s()
        for _ in self.work():
            if self._learner.device.type == "cuda":
                torch.cuda.current_stream(self._learner.device).synchronize()
            self.keep()
            spent_s = self._clock() - since[0]
            while (pause_s := self.pause_s(spent_s, since)) > 0:
                if self._is_closed.wait(pause_s):
                    return
            since = self._clock(), self._drafted_s()
        self.keep()
        self._is_closed.wait(_IDLE_S)

    def _read(self, path: Path) -> Weights:
        try:
            with safetensors.safe_open(path, "pt", device=str(self._learner.device)) as file:
                draft, names = (file.metadata() or {}).get(_DRAFT), set(file.keys())
                weights = {name: file.get_tensor(name) for name in names}
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"draft_learning_path is {path}, which cannot be read: {error}; remove it") from error
        if draft != self._draft or names != self._learner.loaded.keys():
            raise ModelError(f"draft_learning_path is {path}, which holds what another draft learned; remove it")
        return weights

    def keep(self) -> None:
        """Write weights that have taken over, so that the file is whole whenever this process is killed."""
        if (path := self._path) is None or not self._has_changed:
            return
        self._has_changed = False
        temporary = path.with_name(f"{path.name}.{os.getpid()}{_TEMPORARY}")
        try:
            for left in path.parent.glob(f"{glob.escape(path.name)}.*{_TEMPORARY}"):
                left.unlink()  # by a process that was killed
            safetensors.torch.save_file(dict(self._served), temporary, {_DRAFT: self._draft})
            os.replace(temporary, path)
        except (OSError, safetensors.SafetensorError) as error:
            logger.warning("What the draft learned was not kept at %s: %s", path, error)
            temporary.unlink(missing_ok=True)


def judge(loaded: Mapping[Lesson, Score], served: Sequence[Score], candidate: Sequence[Score]) -> str | None:
    """Judge new weights by scores on held-out lessons: "taken", "dropped", "undone", or None, which lets them learn on.

    They are taken if they are surely better in all, and surely worse in no group of requests than the served or the
    loaded ones, so that nobody's texts can spoil the drafts of others. They are dropped if they are surely worse in
    all: a draft that begins to learn another domain first loses a little of the old one. The loaded ones come back if
    the served ones are surely worse for a group, which may have come after they were judged.
    """
    num_lessons, groups = Counter(lesson.group for lesson in loaded), defaultdict[str, list[list[Score]]](list)
    for lesson, *scores in zip(loaded, loaded.values(), served, candidate, strict=True):
        groups[lesson.group if num_lessons[lesson.group] >= _SMALL_GROUP else ""].append(scores)
    gain, error = _gain(served, candidate)
    is_spoilt = is_worse = False
    for members in groups.values():
        first, former, new = zip(*members, strict=True)
        is_worse |= _is_worse(first, new) or _is_worse(former, new)
        is_spoilt |= len(members) >= _SMALL_GROUP and _is_worse(first, former)
    if gain > _SURE * error and not is_worse:
        return "taken"
    return "undone" if is_spoilt else "dropped" if gain < -_SURE * error else None


def _is_worse(old: Sequence[Score], new: Sequence[Score]) -> bool:
    gain, error = _gain(old, new)
    return gain + _SURE * error < -_TOLERATED


def _gain(old: Sequence[Score], new: Sequence[Score]) -> tuple[float, float]:
    """Return by what share new weights lengthen the accepted tokens of a pass, and the standard error of that."""
    gains = [after.accepted - before.accepted for before, after in zip(old, new, strict=True)]
    accepted, places = map(sum, zip(*old, strict=True))
    mean = sum(gains) / places
    error = math.sqrt(sum((gain - mean * score.places) ** 2 for gain, score in zip(gains, old, strict=True)))
    return sum(gains) / (accepted + places), error / (accepted + places)
