"""The report: every fault under eight seeded streams, and what their clients saw."""

import asyncio
import itertools
import shutil
from typing import get_args

from rich.console import Console
from rich.table import Table

from tests.faults.faults import FAULTS, Setup
from tests.faults.nodes import NodeServer
from tests.faults.redis_head import RedisServer
from tests.faults.server import FaultServer
from tests.faults.trial import Trial, run_reference, run_trial

SETUPS = get_args(Setup)


def why_not(setup: Setup) -> str | None:
    """Return why there can be no server of a setup on this machine."""
    return "no redis-server on this machine" if setup == "Redis" and shutil.which("redis-server") is None else None


def open_server(setup: Setup, num_trials: int, **arguments: object) -> FaultServer:
    """Return a server on which faults of a setup can be tried so often; the arguments are the application's."""
    if setup == "several nodes":
        return NodeServer(1 + num_trials, **arguments)
    if setup == "Redis":
        return RedisServer(**arguments)
    return FaultServer(tensor_parallel_size=2 if setup == "two ranks" else 1, **arguments)


def report(console: Console, names: list[str], *, num_trials: int, seed: int) -> int:
    """Run the faults one after the other and print a table; return 1 if any stream differs or anything is left."""
    table = Table(title="8 seeded streams of up to 400 tokens; times are medians over the trials")
    for column in ("fault", "trials", "same content", "continued", "longest gap", "new request answered after"):
        table.add_column(column)
    problems: list[str] = []
    faults = sorted((FAULTS[name] for name in names), key=lambda fault: SETUPS.index(fault.setup))
    for setup, group in itertools.groupby(faults, key=lambda fault: fault.setup):
        if reason := why_not(setup):
            console.print(f"not tried: {', '.join(fault.name for fault in group)}: {reason}")
            continue
        server = open_server(setup, num_trials)
        try:
            reference = asyncio.run(run_reference(server))
            for fault in group:
                trials = [
                    asyncio.run(run_trial(server, fault, reference, seed + number)) for number in range(num_trials)
                ]
                problems += [f"{fault.name}: {problem}" for trial in trials for problem in trial.problems]
                problems += [f"{fault.name}: {gauge} is {value}" for gauge, value in server.what_is_left().items()]
                table.add_row(*(row := _row(trials)))
                console.print(", ".join(row))
        finally:
            server.stop()
    console.print(table)
    for problem in problems:
        console.print(problem)
    return bool(problems)


def _row(trials: list[Trial]) -> tuple[str, ...]:
    num_streams = sum(len(trial.streams) for trial in trials)
    num_differing = sum(len(trial.differing) for trial in trials)
    num_continued = sum(stream.num_reconnects > 0 for trial in trials for stream in trial.streams)
    gap_s, back_s = (
        sorted(getattr(trial, name) for trial in trials)[len(trials) // 2] for name in ("longest_gap_s", "back_after_s")
    )
    name = trials[0].fault.name
    equal = f"{num_streams - num_differing} of {num_streams}"
    return name, str(len(trials)), equal, str(num_continued or "-"), f"{gap_s:.1f} s", f"{back_s:.1f} s"
