"""Readings of `/metrics`, and where the time of the rounds between two of them went."""

from collections import Counter
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.bench.figures import RoundSplit, RunAhead
from tests.load.records import Acceptance

TIMES = ("round", "target_wait", "target_compute", "draft_wait", "draft_compute", "delivery")


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of `/metrics` at one moment.

    Attributes:
        num_decode_rounds, seconds: rounds without prompts, and their times by `TIMES`.
        run_ahead: None where nobody runs ahead.
    """

    acceptance: Acceptance
    num_decode_rounds: int
    seconds: dict[str, float]
    run_ahead: RunAhead | None

    @classmethod
    def parse(cls, text: str) -> "Reading":
        totals, decoding = Counter[str](), Counter[str]()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name + sample.labels.get("outcome", "")
                totals[name] += sample.value  # type: ignore[assignment]
                if sample.labels.get("phase") == "decode":
                    decoding[name] += sample.value  # type: ignore[assignment]
        drafts = [f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
        hits, waits = "paceline:verdict_cache_hits_total", "paceline:run_ahead_wait_seconds"
        ahead = [hits, "paceline:verdict_cache_misses_total", f"{waits}_counthit", f"{waits}_countmiss"]
        return cls(
            Acceptance(*(int(totals[name]) for name in drafts)),
            int(decoding["paceline:rounds_total"]),
            {name: decoding[f"paceline:{name}_seconds_total"] for name in TIMES},
            RunAhead(*(int(totals[name]) for name in ahead), totals[f"{waits}_sumhit"], totals[f"{waits}_summiss"])
            if hits in totals
            else None,
        )


def split_between(before: Reading, after: Reading) -> RoundSplit | None:
    """Return the mean times of the rounds between two readings, as the Router and its workers count them."""
    num_rounds = after.num_decode_rounds - before.num_decode_rounds
    if not num_rounds:
        return None
    mean = {name: (after.seconds[name] - before.seconds[name]) / num_rounds for name in TIMES}
    return RoundSplit(
        num_rounds,
        round_s=mean["round"],
        target_s=mean["target_compute"],
        draft_s=mean["draft_compute"],
        wire_s=mean["target_wait"] - mean["target_compute"] + mean["draft_wait"] - mean["draft_compute"],
        delivery_s=mean["delivery"],
    )
