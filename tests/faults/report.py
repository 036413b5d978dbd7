"""The report: every fault under eight seeded streams, and what their clients saw."""

import asyncio
import itertools
import shutil
from contextlib import closing
from typing import get_args

from rich.console import Console
from rich.table import Table

from tests.faults.answers import Answers
from tests.faults.faults import FAULTS, Setup
from tests.faults.nodes import NodeServer
from tests.faults.redis_head import RedisServer
from tests.faults.server import FaultServer
from tests.faults.streams import REQUESTS
from tests.faults.trial import run_trial

SETUPS = get_args(Setup)


def why_not(setup: Setup) -> str | None:
    """Return why there can be no server of a setup on this machine."""
    return "no redis-server on this machine" if setup == "Redis" and shutil.which("redis-server") is None else None


def open_server(setup: Setup, **arguments: object) -> FaultServer:
    """Return a server on which a fault of a setup can be tried; the arguments are the application's."""
    if setup == "several nodes":
        return NodeServer(2, **arguments)
    if setup == "Redis":
        return RedisServer(**arguments)
    return FaultServer(tensor_parallel_size=2 if setup == "two ranks" else 1, **arguments)


def report(console: Console, names: list[str], seed: int, **arguments: object) -> list[str]:
    """Run the faults one after the other and print a table; return what differs, is left, or cannot be tried."""
    columns = ("fault", "same content", "continued", "longest gap", "new request answered after")
    table = Table(*columns, title="8 seeded streams of up to 400 tokens")
    problems, answers = list[str](), Answers(REQUESTS)
    faults = sorted((FAULTS[name] for name in names), key=lambda fault: SETUPS.index(fault.setup))
    for setup, group in itertools.groupby(faults, key=lambda fault: fault.setup):
        if reason := why_not(setup):
            console.print(f"not tried: {', '.join(fault.name for fault in group)}: {reason}")
            continue
        with closing(open_server(setup, **arguments)) as server:
            for fault in group:
                trial = asyncio.run(run_trial(server, fault, answers, seed))
                problems += [f"{fault.name}: {problem}" for problem in trial.problems]
                problems += [f"{fault.name}: {gauge} is {value}" for gauge, value in server.what_is_left().items()]
                num_continued = sum(stream.num_reconnects > 0 for stream in trial.streams)
                equal = f"{len(trial.streams) - len(trial.differing)} of {len(trial.streams)}"
                times = f"{trial.longest_gap_s:.1f} s", f"{trial.back_after_s:.1f} s"
                table.add_row(fault.name, equal, str(num_continued or "-"), *times)
    console.print(table)
    for problem in problems:
        console.print(problem)
    return problems
