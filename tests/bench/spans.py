"""Spans: where time goes, by exclusive times of functions that call each other."""

import functools
import inspect
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self


class Spans:
    """Seconds per name; time spent in a wrapped function called by another counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open: list[tuple[str, float]] = []
        self._wrapped: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for owner, attribute, original in reversed(self._wrapped):
            setattr(owner, attribute, original)

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Replace a function of a module, a class or an object by one that is timed, until the spans are left.

        The coroutines timed here never wait, so they nest as functions do.
        """
        original = getattr(owner, attribute)
        self._wrapped.append((owner, attribute, original))

        @functools.wraps(original)
        async def timed_coroutine(*args: Any, **kwargs: Any) -> Any:
            with self._span(name):
                return await original(*args, **kwargs)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._span(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, timed_coroutine if inspect.iscoroutinefunction(original) else timed)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        now = time.perf_counter()
        if self._open:
            self._add(now)
        self._open.append((name, now))
        try:
            yield
        finally:
            now = time.perf_counter()
            self._add(now)
            self._open.pop()
            if self._open:
                self._open[-1] = (self._open[-1][0], now)

    def _add(self, now: float) -> None:
        name, since = self._open[-1]
        self.seconds[name] += now - since  # type: ignore[assignment]
