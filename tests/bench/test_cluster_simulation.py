"""The simulated cluster against what can be worked out by hand."""

from pathlib import Path

import pytest

from deployments.config import Autoscaling
from tests.bench.arrivals import CONVERSATIONS, Arrival, busiest, rate, read_trace, scale
from tests.bench.cluster_simulation import Scenario, fixed, simulate
from tests.bench.cluster_tables import largest_load
from tests.bench.group_model import GroupCosts
from tests.bench.measured_group import poisson, predict
from tests.bench.served_group import ServedGroup

COSTS = GroupCosts(
    round_ms=20.0,
    stream_ms=1.0,
    prompt_token_ms=0.1,
    tokens_per_round=2.0,
    chunk_tokens=1000,
    max_num_seqs=4,
    max_queued_requests=8,
    num_gpus=2,
)
FOREVER = Scenario(COSTS, Autoscaling())
SCALED = Scenario(
    COSTS,
    Autoscaling(max_replicas=8, requests_per_replica=4, upscale_delay_s=1.0, downscale_delay_s=30.0),
    start_s=20.0,
)


def steady(num: int, gap_s: float, *, num_prompt_tokens: int = 100, num_tokens: int = 41) -> list[Arrival]:
    return [Arrival(index * gap_s, num_prompt_tokens, num_tokens) for index in range(num)]


def test_one_request_takes_its_prompt_and_its_rounds() -> None:
    [job] = simulate(FOREVER, steady(1, 0.0)).jobs
    # 100 of 1000 tokens of a round are a tenth of it: 2 ms and 10 ms. Then 20 rounds of 21 ms.
    assert job.first_token_s == pytest.approx(0.012)
    assert job.finished_s == pytest.approx(0.012 + 20 * 0.021)


def test_streams_share_rounds_and_those_beyond_the_batch_wait() -> None:
    jobs = simulate(FOREVER, steady(8, 0.0, num_prompt_tokens=0)).jobs
    assert [job.started_s for job in jobs[:4]] == pytest.approx([0.0] * 4, abs=1e-3)
    full_s = 20 * 0.024
    assert jobs[3].finished_s == pytest.approx(full_s)
    assert jobs[4].started_s == pytest.approx(full_s)
    assert jobs[7].finished_s == pytest.approx(2 * full_s)


def test_a_full_queue_refuses() -> None:
    outcome = simulate(FOREVER, steady(20, 0.0))
    assert (outcome.num_rejected, len(outcome.jobs)) == (8, 12)


def test_every_request_ends_once() -> None:
    outcome = simulate(SCALED, steady(2000, 0.05))
    assert len(outcome.jobs) + outcome.num_rejected == 2000
    assert all(job.finished_s is not None and job.tokens_left == 0 for job in outcome.jobs)


def test_a_step_is_decided_on_within_3_seconds_and_the_minimum_comes_back_after_the_delay() -> None:
    busy = [Arrival(10.0, 100, 1600) for _ in range(8)]
    outcome = simulate(SCALED, [*busy, Arrival(200.0, 100, 40)])
    (up_s, up), *_, (down_s, down) = outcome.targets
    assert (up, down) == (2, 1)
    assert 10.0 < up_s < 13.0
    last_s = max(job.finished_s or 0.0 for job in outcome.jobs[:8])
    assert last_s + 25.0 < down_s < last_s + 33.0


def test_losses_cost_time_and_no_request() -> None:
    load = steady(500, 0.2)
    outcome = simulate(Scenario(COSTS, Autoscaling(min_replicas=3), start_s=5.0, losses_per_group_hour=200.0), load)
    assert outcome.num_losses > 5
    assert any(job.num_losses for job in outcome.jobs)
    assert len(outcome.jobs) == 500
    assert all(job.finished_s is not None for job in outcome.jobs)


def test_group_hours_count_from_the_decision_to_the_end_of_the_last_stream() -> None:
    outcome = simulate(fixed(SCALED, 3), steady(10, 1.0))
    last_s = max(job.finished_s or 0.0 for job in outcome.jobs)
    assert outcome.group_hours * 3600 == pytest.approx(3 * last_s)


def test_twice_the_groups_serve_about_twice_the_load() -> None:
    window = poisson(COSTS, 0.5)
    loads = [largest_load(window, FOREVER, num_groups)[0] for num_groups in (2, 4)]
    assert loads[1] / loads[0] == pytest.approx(2.0, rel=0.3)


def test_a_light_load_takes_what_its_requests_take_alone() -> None:
    costs = GroupCosts(20.0, 1.0, 0.1, 2.0)
    arrivals = [Arrival(10.0 * index, 100, 41) for index in range(5)]
    prompt_s, text_s = 100 / 512 * (0.02 + 512 * 0.0001), 20 * 0.021
    assert predict(costs, arrivals).mean_latency_s == pytest.approx(prompt_s + text_s)


def test_a_trace_is_read_scaled_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:56.6805900,30,0\n2023-11-16 18:15:57.1805900,5,6\n"
    )
    arrivals = read_trace(path)
    assert arrivals == [Arrival(0.0, 374, 44), Arrival(10.0, 30, 1), Arrival(10.5, 5, 6)]
    assert busiest(arrivals, 1.0) == [Arrival(0.0, 30, 1), Arrival(0.5, 5, 6)]
    assert len(scale(arrivals, 3.0)) == 9
    times = [arrival.time_s for arrival in scale(arrivals, 2.5)]
    assert times == sorted(times)


@pytest.mark.skipif(not CONVERSATIONS.exists(), reason="Azure's trace is not beside the repository")
def test_the_conversations_are_those_of_the_published_trace() -> None:
    assert rate(read_trace(CONVERSATIONS)) == pytest.approx(5.53, abs=0.01)


def test_a_request_takes_its_rounds_and_what_it_takes_besides() -> None:
    group = ServedGroup(COSTS, added_s=0.5, busy_s=3.0)
    [latency_s] = group.latencies_s([Arrival(0.0, 0, 40)], [50], 1)
    assert latency_s == pytest.approx(0.5 + 50 * 0.021)


def test_a_request_takes_longer_where_others_run() -> None:
    idle, busy = (ServedGroup(COSTS, added_s=0.5, busy_s=busy_s) for busy_s in (0.0, 3.0))
    arrivals = [Arrival(0.0, 0, 40), Arrival(0.1, 0, 40), Arrival(100.0, 0, 40)]
    without, with_others = (group.latencies_s(arrivals, [20] * 3, 1) for group in (idle, busy))
    more_s = [longer - shorter for shorter, longer in zip(without, with_others, strict=True)]
    assert more_s == pytest.approx([0.0, 3.0, 0.0])
