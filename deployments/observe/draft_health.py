"""DraftHealth: whether the drafts of the last minute were of use, for the log, once, and for `/metrics`."""

import logging
import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

from engine.control.stats import SpeculationStats

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

PERIOD_S = 5.0
WINDOW_S = 60.0
LOW_ACCEPTANCE = 0.15
MIN_ROUNDS = 50
"""With fewer rounds in a window nothing is said."""
WHY_PLAIN: Mapping[str, tuple[str, str]] = {
    "off": ("speculation is off, or there is no draft", "serve with a draft_model and speculation=adaptive"),
    "request": ("the requests turn it off", "leave `speculative` out of requests"),
    "goodput": ("adaptive speculation measured that they do not pay", "try a smaller draft, or fewer requests at once"),
    "trial": ("other lengths are being tried", "measure again later"),
}
"""Why rounds have no draft, and what to do, by the reason that /metrics gives for their length."""


class DraftHealth:
    """Watches an engine's counters; `problems` tells which of `paceline:draft_problem` there are (see the README)."""

    def __init__(
        self, stats: SpeculationStats, fallbacks: Counter[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.problems = dict.fromkeys(("low_acceptance", "unused", "costs_more"), False)
        self._stats, self._fallbacks, self._clock = stats, fallbacks, clock
        self._window: deque[tuple[tuple[float, ...], Counter[str], Counter[str]]] = deque()
        self._told: set[str] = set()

    def observe(self, num_rounds: float, round_s: float, draft_wait_s: float, target_s: float) -> None:
        """Read the counters, unless that was less than `PERIOD_S` ago; the arguments are counters of rounds, too."""
        stats, now_s = self._stats, self._clock()
        if self._window and now_s < self._window[-1][0][0] + PERIOD_S:
            return
        drafted = stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_generation_tokens
        plain = Counter({why: n for (length, why), n in stats.num_rounds_by_length.items() if not length})
        counts = (now_s, num_rounds, round_s, draft_wait_s, target_s, *drafted)
        self._window.append((counts, plain, self._fallbacks.copy()))
        while len(self._window) > 1 and self._window[1][0][0] <= now_s - WINDOW_S:
            self._window.popleft()
        found = self._judge()
        self.problems = {name: name in found for name in self.problems}
        for name in found.keys() - self._told:
            logger.warning("drafts, last minute: %s", found[name])
            self._told.add(name)

    def _judge(self) -> dict[str, str]:
        """Return the problems of the window, in words."""
        (before, plain_before, lost_before), (now, plain, lost) = self._window[0], self._window[-1]
        passed_s, rounds, round_s, wait_s, target_s, drafted, accepted, tokens = map(operator.sub, now, before)
        if passed_s < WINDOW_S or rounds < MIN_ROUNDS:
            return {}
        found, plain, lost = {}, plain - plain_before, lost - lost_before
        most = max(plain, key=plain.__getitem__, default="")
        why, advice = WHY_PLAIN.get(most, ("none was proposed", "read its log"))
        if lost.total() > plain.total():
            why, advice = f"its worker did not answer ({lost.most_common(1)[0][0]})", "read its log"
        if not drafted:
            found["unused"] = f"a draft is loaded, and none was used in {rounds:.0f} rounds: {why}; {advice}"
        elif accepted < LOW_ACCEPTANCE * drafted:
            found["low_acceptance"] = (
                f"{accepted / drafted:.0%} of {drafted:.0f} draft tokens were accepted; take a draft of the target's "
                "family, trained alike, or draft_model=none"
            )
        # While two cohorts alternate, rounds wait for drafts as the target computes; that costs nothing.
        gain, cost = tokens / max(1.0, tokens - accepted), round_s / max(1e-9, round_s - wait_s, target_s)
        if 2 * plain["goodput"] > rounds:
            found["costs_more"] = f"they cost more than they bring at this load: {', '.join(WHY_PLAIN['goodput'])}"
        elif drafted and gain < cost:
            found["costs_more"] = (
                f"they cost more than they bring at this load: {gain:.2f} times the tokens of a round, and waiting "
                f"for drafts makes it {cost:.2f} times as long; use speculation=adaptive, or a smaller draft"
            )
        return found
