"""The simulated cluster's tables: what so many groups serve, what scaling costs and saves, and a check against here."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deployments.config import Autoscaling
from tests.bench.arrivals import Arrival, busiest, rate, read_trace, scale
from tests.bench.cluster_simulation import Outcome, Scenario, fixed, simulate
from tests.bench.group_model import GroupCosts
from tests.bench.measured_group import check
from tests.bench.workload import Workload

LLAMA_GROUP = GroupCosts(
    round_ms=24.3,
    stream_ms=0.64,
    prompt_token_ms=0.128,
    tokens_per_round=3.7,
    chunk_tokens=1024,
    num_gpus=5,
)
SOURCES = (
    "A group: Llama-3.1-70B on 4 H100, Llama-3.2-1B on a fifth, 4 drafts. Round 18.15 ms + 4 draft passes of 1.52, "
    "0.128 ms per token, as in the table of one group; acceptance 0.85. Arrivals: Azure's hour of conversations "
    "(2023, CC-BY-4.0; 5.5 requests/s, 1155 prompt tokens and 211 tokens on average), scaled by shifted copies."
)
GROUPS = (1, 2, 4, 8, 16, 32, 64, 100)
WINDOW_S = 300.0
WAIT_S = 1.0
"""Sizing: 99 % of the requests of the busiest five minutes must begin within this time, and none may be refused."""
RATES = (1, 8)
PEAK_GROUPS = 3
"""Fixed number of groups per `RATES`, by the table of sizes."""
SCALING = Autoscaling(max_replicas=100)


def run(workload: Workload, trace: Path, console: Console) -> list[str]:
    """Print the tables; returns why something was left out."""
    console.print(check(workload))
    if not trace.exists():
        return [f"no simulation of a cluster: there is no trace {trace}"]
    arrivals = read_trace(trace)
    console.print(sizing(arrivals))
    console.print(scaling(arrivals))
    return []


def sizing(arrivals: list[Arrival], costs: GroupCosts = LLAMA_GROUP) -> Table:
    """Return how many requests per second a fixed number of groups serves."""
    title = f"SIMULATED: groups for a load, 99 % begin within {WAIT_S:g} s in the busiest {WINDOW_S:g} s"
    table = Table(title=title, caption=SOURCES, caption_justify="left")
    for column in ("groups", "GPUs", "requests/s", "per group", "wait p50 s", "wait p99 s", "first token p99 s"):
        table.add_column(column, justify="right")
    window = busiest(arrivals, WINDOW_S)
    for num_groups in GROUPS:
        factor, outcome = largest_load(window, Scenario(costs, SCALING), num_groups)
        requests_per_s = factor * rate(window)
        table.add_row(
            str(num_groups),
            str(num_groups * costs.num_gpus),
            f"{requests_per_s:.1f}",
            f"{requests_per_s / num_groups:.2f}",
            *_times(outcome),
        )
    return table


def largest_load(window: list[Arrival], scenario: Scenario, num_groups: int) -> tuple[float, Outcome]:
    """Return the largest multiple of a window's load that so many groups serve in time, by bisection."""
    low, high = 0.0, 2.0 * num_groups
    best: Outcome | None = None
    for _ in range(7):
        middle = (low + high) / 2
        outcome = simulate(fixed(scenario, num_groups), scale(window, middle))
        if outcome.wait_s(0.99) <= WAIT_S and not outcome.num_rejected:
            low, best = middle, outcome
        else:
            high = middle
    return low, best or outcome


def scaling(arrivals: list[Arrival], costs: GroupCosts = LLAMA_GROUP) -> Table:
    """Return what replicas that follow the queue cost and save over an hour, beside as many as the peak needs."""
    table = Table(title="SIMULATED: an hour of the trace, replicas that follow the queue", caption_justify="left")
    columns = (
        "requests/s",
        "groups",
        "per group",
        "start s",
        "losses",
        "wait p50 s",
        "wait p99 s",
        "first token p99 s",
    )
    for column in (*columns, "GPU hours", "refused", "decisions"):
        table.add_column(column, justify="right")
    for factor in RATES:
        load = scale(arrivals, factor)
        for scenario in _scenarios(costs, PEAK_GROUPS * factor):
            outcome, bounds = simulate(scenario, load), scenario.scaling
            is_fixed = bounds.upper_bound == bounds.min_replicas
            table.add_row(
                f"{rate(load):.1f}",
                str(bounds.upper_bound) if is_fixed else f"{bounds.min_replicas}..{bounds.upper_bound}",
                "" if is_fixed else str(bounds.requests_per_replica),
                f"{scenario.start_s:g}",
                str(outcome.num_losses),
                *_times(outcome),
                f"{outcome.group_hours * costs.num_gpus:.1f}",
                str(outcome.num_rejected),
                str(len(outcome.targets)),
            )
        table.add_section()
    return table


def _scenarios(costs: GroupCosts, num_groups: int) -> Iterator[Scenario]:
    """Yield the lines of one load: a fixed number, then replicas that follow the queue from half of that number on."""
    scenario = Scenario(costs, SCALING, num_initial=-(-num_groups // 2))
    yield fixed(scenario, num_groups)
    yield replace(fixed(scenario, num_groups), losses_per_group_hour=1.0)
    for requests_per_replica in (24, 12, 6):
        settings = SCALING.model_copy(update={"requests_per_replica": requests_per_replica})
        yield replace(scenario, scaling=settings)
    for start_s in (20.0, 180.0):
        yield replace(scenario, scaling=settings, start_s=start_s)
    yield replace(scenario, scaling=settings, losses_per_group_hour=1.0)


def _times(outcome: Outcome) -> tuple[str, str, str]:
    return f"{outcome.wait_s(0.5):.2f}", f"{outcome.wait_s(0.99):.2f}", f"{outcome.first_token_s(0.99):.2f}"
