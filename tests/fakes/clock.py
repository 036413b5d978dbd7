"""Time that tests move."""


class Clock:
    """Takes the place of `time.perf_counter`; a test sets `now`.

    Args:
        tick: seconds that each look at the clock takes.
    """

    def __init__(self, now: float = 0.0, *, tick: float = 0.0) -> None:
        self.now, self.tick = now, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now
