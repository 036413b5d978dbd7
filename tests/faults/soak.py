"""The chaos soak: random faults under mixed load; no text changes, nothing hangs, and nothing is left behind."""

import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles

from rich.console import Console

from tests.faults.answers import Answers
from tests.faults.chaos import BURST_SIZES, Chaos
from tests.faults.leftovers import Belongings, count_files, count_roles, half_closed
from tests.faults.load import Load
from tests.faults.server import FaultServer
from tests.faults.streams import open_session

NUM_CLIENTS = 8
MAX_NUM_SEQS = 8
MAX_QUEUED_REQUESTS = 32
"""Small, so that bursts are refused."""
SETTLE_S = 60.0
"""How long processes that were killed last may take to be replaced."""
NOTE_S = 2.0
SHOWN = 20
"""Problems printed; the JSON has all."""
MORE_FILES = 16
"""By how many open files a process may have grown; a leak of one per request is hundreds."""


@dataclass(slots=True)
class SoakReport:
    """What was done to the server, what its clients saw, and what was left.

    Attributes:
        num_missed: faults whose process was just being replaced.
        requests: of the clients, by how they ended.
        counters: the server's own counts of requests.
        resubmissions: requests that were sent to a Router again, by reason.
        problems: every invariant that does not hold, in words.
    """

    duration_s: float
    seed: int
    faults: dict[str, int] = field(default_factory=dict)
    num_missed: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    median_s: float = 0.0
    slowest_percent_s: float = 0.0
    longest_gap_s: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    resubmissions: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def soak(duration_s: float, seed: int, json_path: Path | None, console: Console) -> SoakReport:
    """Run the chaos and print the report; with a path, write it as JSON, and log and records beside it."""
    report = SoakReport(duration_s, seed)
    belongings = Belongings()
    server = FaultServer(belongings.variables, max_num_seqs=MAX_NUM_SEQS, max_queued_requests=MAX_QUEUED_REQUESTS)
    try:
        answers = asyncio.run(_run(server, belongings, report))
    finally:
        if json_path is not None:
            json_path.with_suffix(".log").write_text(server.log)
        server.close()
    report.problems += [f"request {index}: {words}" for index, words in answers.audit().items()]
    report.problems += [f"left behind: {name}" for name in belongings.left()]
    problems = report.problems
    console.print_json(json.dumps(asdict(report) | {"problems": problems[:SHOWN]}))
    console.print(f"{len(problems)} problems" if problems else "nothing differs, hangs or is left behind")
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(report), indent=2) + "\n")
        lines = (json.dumps(answers.record(index)) + "\n" for index in answers.first)
        json_path.with_suffix(".jsonl").write_text("".join(lines))
    return report


async def _run(server: FaultServer, belongings: Belongings, report: SoakReport) -> Answers:
    choices = random.Random(report.seed)
    async with open_session(server.url) as session:
        load = Load(session)
        await load.burst(BURST_SIZES[1])  # opens the connections that HAProxy and the Ingress keep
        before, num_files = count_roles(server), count_files(server, ":Ingress")
        chaos = Chaos(server, load, choices)
        noting = asyncio.create_task(_note(belongings))
        striking = asyncio.create_task(chaos.run())
        deadline = time.monotonic() + report.duration_s
        clients = [load.be_a_client(random.Random(choices.random()), deadline) for _ in range(NUM_CLIENTS)]
        await asyncio.gather(*clients)
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
        await chaos.finish()
        await load.check_all()
        noting.cancel()
    report.faults, report.num_missed = dict(chaos.strikes), chaos.num_missed
    report.requests, report.longest_gap_s = dict(load.outcomes), load.longest_gap_s
    if len(load.latencies_s) > 1:
        cuts = quantiles(load.latencies_s, n=100)
        report.median_s, report.slowest_percent_s = cuts[49], cuts[98]
    report.problems += load.problems + await _unsettled(server, before)
    report.problems += [f"{name} is {value} at the end" for name, value in server.what_is_left().items()]
    report.problems += half_closed(server)
    if (more := count_files(server, ":Ingress") - num_files) > MORE_FILES:
        report.problems.append(f"the Ingress has {more} more files open")
    _count_requests(server, report)
    return load.answers


def _count_requests(server: FaultServer, report: SoakReport) -> None:
    """Compare what the server counted with what the clients did."""
    metrics = server.metrics()
    resubmissions = metrics.by("paceline:resubmissions_total", "reason")
    report.resubmissions = {reason: count for (reason,), count in resubmissions.items()}
    ended = {outcome: count for (outcome,), count in metrics.by("paceline:requests_ended_total", "outcome").items()}
    report.counters = {"started": metrics.total("paceline:requests_started_total"), **ended}
    if report.counters["started"] != sum(ended.get(outcome, 0) for outcome in ("finished", "failed", "aborted")):
        report.problems.append(f"requests that never ended: {report.counters}")
    if ended.get("aborted", 0) > report.requests.get("aborted", 0):
        report.problems.append(f"requests were aborted that no client gave up: {report.counters}, {report.requests}")


async def _unsettled(server: FaultServer, before: dict[str, int]) -> list[str]:
    """Wait until there are as many processes as before; return the difference that stays."""
    deadline = time.monotonic() + SETTLE_S
    while (now := await asyncio.to_thread(count_roles, server)) != before:
        if time.monotonic() > deadline:
            return [f"the processes are {now} instead of {before}"]
        await asyncio.sleep(0.2)
    return []


async def _note(belongings: Belongings) -> None:
    while True:
        await asyncio.to_thread(belongings.note)
        await asyncio.sleep(NOTE_S)
