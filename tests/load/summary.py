"""Summary: the figures of many requests, as `summary.json` has them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .records import LATENCIES, OK, REJECTED, Acceptance, Record, Slo

Summary = dict[str, Any]
"""By name. Latencies, in milliseconds, are those of successful requests; `acceptance` is None without drafts."""


def summarize(records: Sequence[Record], slo: Slo | None, *, acceptance: Acceptance | None = None) -> Summary:
    """Return the figures of some requests.

    Args:
        acceptance: the server's own counts, used if requests do not have theirs.
    """
    succeeded = [record for record in records if record.is_ok]
    outcomes = Counter(record.outcome for record in records)
    counted = [record.acceptance for record in succeeded if record.acceptance is not None]
    accepted = sum(counted, Acceptance()) if counted else acceptance
    duration_s = _duration_s(records)
    num_tokens = sum(record.num_tokens for record in succeeded)
    summary: Summary = {
        "num_ok": len(succeeded),
        "num_rejected": outcomes[REJECTED],
        "failures": {outcome: count for outcome, count in outcomes.items() if outcome not in (OK, REJECTED)},
        "duration_s": duration_s,
        "requests_per_s": len(succeeded) / duration_s if duration_s else 0.0,
        "tokens_per_s": num_tokens / duration_s if duration_s else 0.0,
        "mean_prompt_tokens": sum(record.num_prompt_tokens for record in succeeded) / max(1, len(succeeded)),
        "mean_tokens": num_tokens / max(1, len(succeeded)),
        "latencies_ms": {
            name: _distribution([s for r in succeeded for s in r.latencies_s(name)]) for name in LATENCIES
        },
        "acceptance": accepted and asdict(accepted) | {"rate": accepted.rate, "mean_length": accepted.mean_length},
    }
    if slo is not None:
        share = slo.share(records)
        goodput_per_s = share * len(records) / duration_s if duration_s else 0.0
        summary |= {"good_share": share, "goodput_per_s": goodput_per_s}
    return summary


def by_domain(records: Sequence[Record]) -> dict[str, list[Record]]:
    domains = sorted({record.domain for record in records})
    return {domain: [record for record in records if record.domain == domain] for domain in domains}


def _distribution(values_s: Sequence[float]) -> dict[str, float] | None:
    """Return mean and interpolated percentiles in milliseconds; None if there are no values."""
    if not values_s:
        return None
    values_ms = 1000 * np.array(values_s)
    percentiles = dict(zip(("p50", "p90", "p99"), map(float, np.percentile(values_ms, (50, 90, 99))), strict=True))
    return {"mean": float(values_ms.mean()), **percentiles}


def _duration_s(records: Sequence[Record]) -> float:
    """Return the time from the first arrival to the end of the last request, summed over the turns."""
    total_s = 0.0
    for turn in {(record.arm, record.turn) for record in records}:
        members = [record for record in records if (record.arm, record.turn) == turn]
        total_s += max(record.end_s for record in members) - min(record.scheduled_s for record in members)
    return total_s
