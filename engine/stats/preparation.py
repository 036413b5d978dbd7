"""Preparation: compilations and recordings that a round waited for."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Preparation:
    """Counts work that no round should wait for; all counts should stay 0.

    `compiled`: layers and kernels compiled during a round. `not_recorded`: graphs that could not be recorded. `eager`:
    models that could not be compiled.
    """

    def __init__(self) -> None:
        self.counts = Counter(compiled=0, not_recorded=0, eager=0)
        self._is_expected = True  # until the first model is warmed up

    def observe(self, kind: str) -> None:
        """Add 1 to a count, except within `expected`."""
        if not self._is_expected:
            self.counts[kind] += 1

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Count nothing within this block, because no round waits."""
        self._is_expected = True
        try:
            yield
        finally:
            self._is_expected = False


PREPARATION = Preparation()
