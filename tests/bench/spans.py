"""Spans: where time goes, by exclusive times of functions that call each other."""

import functools
import inspect
import time
from typing import Any, Self


class Spans:
    """Seconds per name; time spent in a wrapped function called by another counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
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
        if inspect.iscoroutinefunction(original):

            @functools.wraps(original)
            async def timed_coroutine(*args: Any, **kwargs: Any) -> Any:
                self._enter(name)
                try:
                    return await original(*args, **kwargs)
                finally:
                    self._leave()

            setattr(owner, attribute, timed_coroutine)
            return

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(name)
            try:
                return original(*args, **kwargs)
            finally:
                self._leave()

        setattr(owner, attribute, timed)

    def reset(self) -> None:
        """Forget what was measured so far."""
        self.seconds.clear()

    def _enter(self, name: str) -> None:
        now = time.perf_counter()
        if self._open:
            self._add(now)
        self._open.append((name, now))

    def _leave(self) -> None:
        now = time.perf_counter()
        self._add(now)
        self._open.pop()
        if self._open:
            self._open[-1] = (self._open[-1][0], now)

    def _add(self, now: float) -> None:
        name, since = self._open[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - since
