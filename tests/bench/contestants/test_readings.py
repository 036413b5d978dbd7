"""What two readings of `/metrics` say of the rounds between them."""

from tests.bench.contestants.readings import Reading, split_between
from tests.bench.figures import RoundSplit, RunAhead


def reading(rounds: int, times: dict[str, float], outcomes: dict[str, tuple[int, float]] | None = None) -> Reading:
    """Return a reading of rounds without prompts, beside one with prompts that took 90 s of everything."""
    lines = []
    for name, value in {"rounds": rounds, **{f"{name}_seconds": seconds for name, seconds in times.items()}}.items():
        prompts = 1 if name == "rounds" else 90
        lines.append(f'paceline:{name}_total{{model_name="m",phase="decode"}} {value}')
        lines.append(f'paceline:{name}_total{{model_name="m",phase="prefill"}} {prompts}')
    for outcome, (count, seconds) in (outcomes or {}).items():
        name = {"hit": "hits", "miss": "misses"}[outcome]
        lines.append(f"paceline:verdict_cache_{name}_total {5 * count}")
        lines.append(f'paceline:run_ahead_wait_seconds_count{{outcome="{outcome}"}} {count}')
        lines.append(f'paceline:run_ahead_wait_seconds_sum{{outcome="{outcome}"}} {seconds}')
    return Reading.parse("\n".join([*lines, ""]))


def test_the_split_of_a_round_comes_from_the_metrics() -> None:
    mean = {"round": 4.0, "target_wait": 1.5, "target_compute": 1.25, "draft_wait": 1.0, "draft_compute": 0.5}
    mean["delivery"] = 0.25
    before, after = (reading(count, {name: count * value for name, value in mean.items()}) for count in (10, 14))
    split = split_between(before, after)
    assert split == RoundSplit(4, round_s=4.0, target_s=1.25, draft_s=0.5, wire_s=0.75, delivery_s=0.25)
    assert after.run_ahead is None
    assert split_between(before, before) is None
    assert split_between(Reading.parse(""), Reading.parse("")) is None


def test_waiting_for_drafts_is_told_by_outcome() -> None:
    before = reading(10, {}, {"hit": (3, 1.0), "miss": (1, 2.0)}).run_ahead
    after = reading(10, {}, {"hit": (7, 1.5), "miss": (3, 8.0)}).run_ahead
    assert before is not None
    assert after is not None
    assert after - before == RunAhead(20, 10, 4, 2, 0.5, 6.0)
