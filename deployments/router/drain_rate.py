"""DrainRate: how fast a Router finishes requests, and how long a client that it refuses should stay away."""

import math

HALF_LIFE_S = 10.0
"""After so many seconds of work, what was measured before counts half."""
LONGEST_RETRY_S = 60


class DrainRate:
    """Requests finished per second of work, of which the last seconds count most."""

    def __init__(self) -> None:
        # One request in one second, until something has been measured.
        self._num_finished = 1.0
        self._seconds = 1.0
        self._last: float | None = None

    def observe(self, num_finished: int, now: float, *, has_work: bool) -> None:
        """Count requests that finished in a round; the time up to now counts unless there was no work in it."""
        if self._last is not None:
            elapsed = now - self._last
            decay = 0.5 ** (elapsed / HALF_LIFE_S)
            self._num_finished = self._num_finished * decay + num_finished
            self._seconds = self._seconds * decay + elapsed
        self._last = now if has_work else None

    @property
    def per_s(self) -> float:
        """Requests finished per second."""
        return self._num_finished / self._seconds


def retry_after_s(num_requests: int, per_s: float) -> int:
    """Return after how many seconds so many requests have finished, between 1 and `LONGEST_RETRY_S`."""
    if num_requests >= per_s * LONGEST_RETRY_S:
        return LONGEST_RETRY_S
    return max(1, math.ceil(num_requests / per_s))
