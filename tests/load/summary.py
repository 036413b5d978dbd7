"""Summary: the figures of many requests."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .records import LATENCIES, OK, REJECTED, Acceptance, LatencyName, Record, Slo


@dataclass(frozen=True, slots=True)
class Distribution:
    """A latency over requests, or over tokens for `itl`; milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values_s: Iterable[float]) -> "Distribution | None":
        """Return the distribution of values in seconds, percentiles interpolated; None if there are none."""
        values_ms = 1000 * np.array(list(values_s))
        if not len(values_ms):
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(values_ms, (50, 90, 99)))
        return cls(float(values_ms.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a set of requests amounts to. Latencies are those of successful requests.

    Attributes:
        num_rejected: answered with 429.
        failures: other unsuccessful requests by outcome.
        duration_s: time in which there were requests, from the first one's arrival to the end of the last one; over
            several turns, their sum.
        good_share: share of all requests that kept the SLO; None without one.
        acceptance: None if the server reports no drafts.
        texts_checked, texts_differing: texts compared with a reference's; None if there was none.
    """

    num_requests: int
    num_ok: int
    num_rejected: int
    failures: dict[str, int]
    duration_s: float
    requests_per_s: float
    tokens_per_s: float
    mean_prompt_tokens: float
    mean_tokens: float
    latencies_ms: dict[LatencyName, Distribution | None]
    good_share: float | None
    goodput_per_s: float | None
    acceptance: Acceptance | None
    texts_checked: int | None = None
    texts_differing: int | None = None

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        if self.acceptance is not None:
            fields["acceptance"] |= {"rate": self.acceptance.rate, "mean_length": self.acceptance.mean_length}
        return fields


def summarize(records: Sequence[Record], slo: Slo | None, *, acceptance: Acceptance | None = None) -> Summary:
    """Return the figures of some requests.

    Args:
        acceptance: the server's own counts, used if requests do not have theirs.
    """
    succeeded = [record for record in records if record.is_ok]
    duration_s = _duration_s(records)
    outcomes = Counter(record.outcome for record in records)
    failures = {outcome: count for outcome, count in sorted(outcomes.items()) if outcome not in (OK, REJECTED)}
    counted = [record.acceptance for record in succeeded if record.acceptance is not None]
    good_share = slo.share(records) if slo else None
    num_tokens = sum(record.num_tokens for record in succeeded)
    return Summary(
        num_requests=len(records),
        num_ok=len(succeeded),
        num_rejected=outcomes[REJECTED],
        failures=failures,
        duration_s=duration_s,
        requests_per_s=len(succeeded) / duration_s if duration_s else 0.0,
        tokens_per_s=num_tokens / duration_s if duration_s else 0.0,
        mean_prompt_tokens=sum(record.num_prompt_tokens for record in succeeded) / max(1, len(succeeded)),
        mean_tokens=num_tokens / max(1, len(succeeded)),
        latencies_ms={
            name: Distribution.of(value for record in succeeded for value in record.latencies_s(name))
            for name in LATENCIES
        },
        good_share=good_share,
        goodput_per_s=good_share * len(records) / duration_s if good_share is not None and duration_s else None,
        acceptance=sum(counted, Acceptance()) if counted else acceptance,
    )


def by_domain(records: Sequence[Record]) -> dict[str, list[Record]]:
    domains = sorted({record.domain for record in records})
    return {domain: [record for record in records if record.domain == domain] for domain in domains}


def _duration_s(records: Sequence[Record]) -> float:
    total_s = 0.0
    for turn in {(record.arm, record.turn) for record in records}:
        members = [record for record in records if (record.arm, record.turn) == turn]
        total_s += max(record.end_s for record in members) - min(record.scheduled_s for record in members)
    return total_s
