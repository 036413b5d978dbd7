"""DraftHealth: whether the drafts of the last minute were of use, for the log, once, and for `/metrics`."""

import logging
import operator
import time
from collections import Counter
from collections.abc import Callable

from engine.control.judge import PROBLEMS, Rounds, problems
from engine.stats.drafts import SpeculationStats

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

WINDOW_S = 60.0


class DraftHealth:
    """Watches an engine's counters; `problems` tells which of `paceline:draft_problem` there are (see the README)."""

    def __init__(
        self, stats: SpeculationStats, fallbacks: Counter[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.problems = dict.fromkeys(PROBLEMS, False)
        self._stats, self._fallbacks, self._clock = stats, fallbacks, clock
        self._before: Rounds | None = None
        self._judged_s = 0.0
        self._told: set[str] = set()

    def observe(self, num_rounds: float, round_s: float, draft_wait_s: float, target_s: float) -> None:
        """Judge the rounds of each minute that has passed; the arguments are counters, which grow."""
        stats, now_s = self._stats, self._clock()
        if self._before is not None and now_s < self._judged_s + WINDOW_S:
            return
        drafted = stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_generation_tokens
        plain = Counter({why: n for (length, why), n in stats.num_rounds_by_length.items() if not length})
        now = Rounds(num_rounds, round_s, draft_wait_s, target_s, *drafted, plain, self._fallbacks.copy())
        reasons = problems(Rounds(*map(operator.sub, now, self._before))) if self._before else {}
        self._before, self._judged_s = now, now_s
        self.problems = {name: name in reasons for name in PROBLEMS}
        for name in reasons.keys() - self._told:
            logger.warning("drafts, last minute: %s", reasons[name])
            self._told.add(name)
