"""Arms: ways to speculate that take turns on the same requests, and how they compare."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from .records import Record
from .server import Counters, LoadError

DEFAULT = "default"
"""What the server does if nothing is asked."""
_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, 97.5 %, for 1 to 10 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to speculate.

    Attributes:
        name: `default`; `off`, `limit-K` (at most K draft tokens) and `fixed-K` (always K), asked for by request;
            `fixed` or `adaptive`, the server's own setting, which is checked.
        url: the server that it is asked of.
    """

    name: str
    url: str

    def fields(self) -> dict[str, Any]:
        """Return what the request's `speculative` has for this arm."""
        kind, _, length = self.name.partition("-")
        if length:
            return {"num_speculative_tokens": int(length), **({"fixed": True} if kind == "fixed" else {})}
        return {"enabled": False} if kind == "off" else {}

    def check(self, counters: Counters | None) -> None:
        """Check that the server did what the arm is called.

        Args:
            counters: what its requests added to the server's.

            Raises LoadError if it did something else, or its `/metrics` does not tell.
        """
        if self.name == DEFAULT:
            return
        if counters is None:
            raise LoadError(f"arm {self.name}: {self.url}/metrics has no counters of drafts, so it cannot be checked")
        num_drafted = counters.acceptance.num_draft_tokens
        if self.name == "off" and num_drafted:
            raise LoadError(f"arm off: {self.url} drafted {num_drafted} tokens all the same (is other traffic on it?)")
        if self.name == "adaptive" and "goodput" in counters.rounds:
            return  # even if it has found drafts to be slower, and drafted nothing
        if self.name != "off" and not num_drafted and "trial" not in counters.rounds:
            raise LoadError(f"arm {self.name}: {self.url} drafted nothing; it has no draft, or speculation is off")
        expected = {"fixed": {"fixed"}, "adaptive": {"goodput", "trial"}}.get(self.name)
        if expected and not expected & counters.rounds.keys():
            raise LoadError(
                f"arm {self.name}: {self.url} is not served with speculation={self.name}; "
                f"name a server that is: --arm-url {self.name}=URL"
            )


def parse_arms(names: str, url: str, urls: Mapping[str, str]) -> list[Arm]:
    """Return the arms of `off,fixed,adaptive`.

    Raises ValueError if an arm is unknown or named twice, or an address is for none of them.
    """
    arms = [Arm(name, urls.get(name, url)) for name in names.split(",")]
    for arm in arms:
        if not re.fullmatch(r"default|off|fixed|adaptive|(limit|fixed)-[1-9]\d*", arm.name):
            raise ValueError(f"{arm.name!r} is none of off, fixed, fixed-K, adaptive, limit-K and default")
    known = [arm.name for arm in arms]
    if len(set(known)) < len(known):
        raise ValueError(f"{names!r} names an arm twice")
    if unknown := urls.keys() - set(known):
        raise ValueError(f"--arm-url names {', '.join(sorted(unknown))}, which --arms does not")
    return arms


def in_turn(arms: Sequence[Arm], turn: int) -> list[Arm]:
    """Return the order of the arms in a turn: another arm is first in each turn."""
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two arms: its geometric mean over turns, and the limits of the mean's 95 % confidence interval."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "Ratio":
        """Return mean and interval (Student's t of the logarithms) of one ratio per turn; one alone has no interval."""
        logs = [math.log(ratio) for ratio in ratios]
        mean = fmean(logs)
        if len(logs) < 2:
            return cls(math.exp(mean), None, None)
        degrees = len(logs) - 1
        quantile = _T_QUANTILES[degrees - 1] if degrees <= len(_T_QUANTILES) else 1.96 + 2.5 / degrees
        half = quantile * stdev(logs) / math.sqrt(len(logs))
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

    def __str__(self) -> str:
        limits = "" if self.low is None or self.high is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.mean:.2f}{limits}"


def speed_up(records: Sequence[Record], arm: str, baseline: str) -> Ratio | None:
    """Return how many times as fast an arm generates tokens as the baseline: the baseline's mean TPOT over the arm's.

    Each turn gives one ratio, of the requests that succeeded in both arms. None if there are none.
    """
    ratios = []
    for turn in sorted({record.turn for record in records}):
        times = [_token_times_s(records, name, turn) for name in (baseline, arm)]
        common = times[0].keys() & times[1].keys()
        if common:
            ratios.append(sum(times[0][index] for index in common) / sum(times[1][index] for index in common))
    return Ratio.of(ratios) if ratios else None


def verdict(arm: str, baseline: str, ratio: Ratio) -> str:
    sentence = f"{arm} generates tokens {ratio} times as fast as {baseline}"
    if ratio.low is None or ratio.high is None:
        return f"{sentence}; one turn does not tell how sure that is"
    if ratio.low > 1:
        return f"{sentence}: it pays"
    if ratio.high < 1:
        return f"{sentence}: it costs more than it saves"
    return f"{sentence}: no difference is shown, more turns may"


def _token_times_s(records: Sequence[Record], arm: str, turn: int) -> dict[int, float]:
    """Return the TPOT of each successful request of an arm's turn, by the request's number."""
    members = (record for record in records if (record.arm, record.turn) == (arm, turn) and record.is_ok)
    return {record.index: record.tpot_s for record in members if record.tpot_s}
