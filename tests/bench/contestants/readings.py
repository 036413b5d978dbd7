"""Readings of `/metrics`: acceptance, and where the time of the rounds between two of them went."""

from deployments.diagnosis.http_client import Metrics
from tests.bench.figures import RoundSplit
from tests.load.records import Acceptance


def acceptance_of(metrics: Metrics) -> Acceptance:
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return Acceptance(*(int(metrics.total(f"vllm:spec_decode_num_{name}_total")) for name in names))


def split_between(before: Metrics, after: Metrics) -> RoundSplit | None:
    """Return the mean times of the rounds between two readings, as the Router and its workers count them."""

    def added(name: str, label: str, value: str) -> float:
        return after.by(name, label).get((value,), 0.0) - before.by(name, label).get((value,), 0.0)

    num_rounds = int(added("paceline:rounds_total", "phase", "decode"))
    if not num_rounds:
        return None
    names = ("round", "target_compute", "draft_compute")
    means = (added(f"paceline:{name}_seconds_total", "phase", "decode") / num_rounds for name in names)
    waits = "paceline:run_ahead_wait_seconds_count"
    num_hits, num_misses = added(waits, "outcome", "hit"), added(waits, "outcome", "miss")
    has_run_ahead = num_hits + num_misses > 0
    return RoundSplit(num_rounds, *means, num_hits / (num_hits + num_misses) if has_run_ahead else None)
