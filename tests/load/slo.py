"""Slo: what a request must keep to be a good one, and what share of requests must be good."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.load.records import LATENCIES, LatencyName, Record


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds on one request's latencies; `itl` limits the longest time between two tokens."""

    limits_ms: tuple[tuple[LatencyName, float], ...]
    min_share: float

    def is_good(self, record: Record) -> bool:
        """Whether a request succeeded within all limits."""
        return record.is_ok and all(
            1000 * max(record.latencies_s(name), default=0.0) <= limit_ms for name, limit_ms in self.limits_ms
        )

    def share(self, records: Sequence[Record]) -> float:
        """Return the share of good requests; refused and failed ones are not good."""
        return sum(map(self.is_good, records)) / len(records) if records else 0.0

    def is_met(self, records: Sequence[Record]) -> bool:
        return bool(records) and self.share(records) >= self.min_share

    def __str__(self) -> str:
        limits = ", ".join(f"{name} <= {limit_ms:g} ms" for name, limit_ms in self.limits_ms)
        return f"{limits} for {self.min_share:.4g} of the requests"


def parse_limits(text: str) -> tuple[tuple[LatencyName, float], ...]:
    """Return the limits of `ttft=500,tpot=50`.

    Raises:
        ValueError: a name is unknown, or a limit is no positive number.
    """
    limits: dict[LatencyName, float] = {}
    for part in text.split(","):
        name, _, value = part.replace(":", "=").partition("=")
        known = next((latency for latency in LATENCIES if latency == name.strip()), None)
        if known is None:
            raise ValueError(f"{name!r} is none of {', '.join(LATENCIES)}")
        limits[known] = float(value)
        if not limits[known] > 0:
            raise ValueError(f"{part!r} is not above 0 ms")
    return tuple(limits.items())
