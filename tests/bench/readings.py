"""Readings of `/metrics`, and where the time of the rounds between two of them went."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from engine.stats import SpeculationStats
from tests.bench.figures import RoundSplit, RunAhead

TIMES = ("round", "target_wait", "target_compute", "draft_wait", "draft_compute", "delivery")


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of `/metrics` at one moment.

    Attributes:
        seconds: the times of rounds without prompts, by `TIMES`.
        all_rounds_s: the time of all rounds.
        run_ahead: None where nobody runs ahead.
    """

    speculation: SpeculationStats
    num_decode_rounds: int
    seconds: dict[str, float]
    all_rounds_s: float
    run_ahead: RunAhead | None

    @classmethod
    def parse(cls, text: str) -> "Reading":
        totals: dict[str, float] = {}
        decoding: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name + sample.labels.get("outcome", "")
                totals[name] = totals.get(name, 0.0) + sample.value
                if sample.labels.get("phase") == "decode":
                    decoding[name] = decoding.get(name, 0.0) + sample.value

        def total(name: str) -> int:
            return int(totals.get(name, 0))

        speculation = SpeculationStats(
            num_drafts=total("vllm:spec_decode_num_drafts_total"),
            num_draft_tokens=total("vllm:spec_decode_num_draft_tokens_total"),
            num_accepted_tokens=total("vllm:spec_decode_num_accepted_tokens_total"),
            num_rounds=total("paceline:rounds_total"),
        )
        waits = "paceline:run_ahead_wait_seconds"
        run_ahead = RunAhead(
            total("paceline:verdict_cache_hits_total"),
            total("paceline:verdict_cache_misses_total"),
            total(f"{waits}_counthit"),
            total(f"{waits}_countmiss"),
            totals.get(f"{waits}_sumhit", 0.0),
            totals.get(f"{waits}_summiss", 0.0),
        )
        return cls(
            speculation,
            int(decoding.get("paceline:rounds_total", 0)),
            {name: decoding.get(f"paceline:{name}_seconds_total", 0.0) for name in TIMES},
            totals.get("paceline:round_seconds_total", 0.0),
            run_ahead if "paceline:verdict_cache_hits_total" in totals else None,
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
