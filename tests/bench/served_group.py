"""The simulated cluster against the service: fitted to single requests and closed batches, compared under open ones.

A light pair computes at the pace of slow GPUs, so that two replicas and the client do not slow each other down on this
machine. Requests arrive at random, at half and at four fifths of what the replicas can do at most, and are not
streamed: the time until a client has the whole answer is compared. The model is told how many rounds each answer took,
since some texts are easier to draft, and says how long that takes where others run.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import numpy as np
from rich.table import Table

from deployments.config import Autoscaling
from tests.bench.arrivals import Arrival
from tests.bench.cluster_simulation import Scenario, fixed, simulate
from tests.bench.figures import since
from tests.bench.group_model import GroupCosts
from tests.bench.light_pair import make_light_pair
from tests.bench.measured_group import LOADS, NUM_TOKENS, poisson
from tests.bench.paced import ENVIRONMENT
from tests.bench.readings import Reading
from tests.bench.with_serve import Server
from tests.bench.workload import Cell, Workload, read_prompts

PACE = "l4-8b+l4-1b"
"""A round takes a tenth of a second."""
GROUPS = (1, 2)
ARRIVALS_PER_GROUP = 100
MAX_NUM_SEQS = 8
CHUNK_TOKENS = 1024
NUM_DRAFTS = 4
BATCHES = (1, 2, 4, 8)
NUM_TURNS = 2
PROMPT_LENGTHS = (20, 180)
PROMPT_TURNS = 8
USUAL_PROMPT = 100
START_S = 60.0


@dataclass(frozen=True, slots=True)
class ServedGroup:
    """A replica as its clients see it.

    Attributes:
        added_s: what a request takes besides the rounds of the model.
        busy_s: what it takes longer if it comes to a group at work: that finishes its round first, and then reads the
            prompt in a round in which others draft.
    """

    costs: GroupCosts
    added_s: float
    busy_s: float

    def latencies_s(self, arrivals: Sequence[Arrival], num_rounds: Sequence[int], num_groups: int) -> list[float]:
        """Return what the model says: the time until each answer is whole.

        Args:
            num_rounds: the rounds that each takes after its prompt: some texts are easier to draft.
        """
        work = [
            replace(arrival, num_tokens=1 + round(number * self.costs.tokens_per_round))
            for arrival, number in zip(arrivals, num_rounds, strict=True)
        ]
        jobs = simulate(fixed(Scenario(self.costs, Autoscaling()), num_groups), work).jobs
        added_s = [self.added_s + (self.busy_s if job.num_before else 0.0) for job in jobs]
        return [
            (job.finished_s or 0.0) - job.arrival.time_s + more_s for job, more_s in zip(jobs, added_s, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Answer:
    """How long an answer took, and how many rounds after its prompt."""

    seconds: float
    num_rounds: int


class Client:
    """Sends requests for so many tokens, and times the answers."""

    def __init__(self, session: aiohttp.ClientSession, text: Sequence[int]) -> None:
        self._session = session
        self._text = text

    async def ask(self, start: int, num_prompt_tokens: int, num_tokens: int) -> Answer:
        """Have a prompt continued that begins at this place of the text."""
        prompt = [*self._text[start : start + num_prompt_tokens]]
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body["speculative"] = {"metrics": "summary"}
        started = time.perf_counter()
        async with self._session.post("/v1/completions", json=body, raise_for_status=True) as response:
            answer = await response.json()
        seconds = time.perf_counter() - started
        num_accepted = answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        return Answer(seconds, num_tokens - 1 - num_accepted)

    async def read(self) -> Reading:
        """Return the service's counters."""
        async with self._session.get("/metrics", raise_for_status=True) as answer:
            return Reading.parse(await answer.text())

    async def wait_for(self, num_groups: int) -> None:
        """Wait until so many replicas can take rounds."""
        async with asyncio.timeout(START_S):
            while True:
                async with self._session.get("/health") as answer:
                    if sum(router["ready"] for router in (await answer.json())["routers"]) == num_groups:
                        return
                await asyncio.sleep(0.2)

    async def open_loop(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        """Send the arrivals at their times."""
        started = time.perf_counter()

        async def ask(index: int, arrival: Arrival) -> Answer:
            await asyncio.sleep(max(0.0, started + arrival.time_s - time.perf_counter()))
            return await self.ask(7 * index, arrival.num_prompt_tokens, arrival.num_tokens)

        return await asyncio.gather(*(ask(*pair) for pair in enumerate(arrivals)))


def check_served() -> Table:
    """Fit the model to one replica, and compare it with one and two under arrivals that it was not fitted to."""
    table = Table(title=f"The simulated cluster against a served one, passes at the pace of {PACE}")
    for column in ("replicas", "load", "whole answer after", "measured s", "simulated s", "ratio"):
        table.add_column(column, justify="right")
    group: ServedGroup | None = None
    with TemporaryDirectory(prefix="paceline-pair-") as folder:
        target, draft = map(str, make_light_pair(Path(folder)))
        workload = Workload(
            target, draft, "float32", f"paced:{PACE}", "off", 1, read_prompts(target), [Cell(MAX_NUM_SEQS, 0.0)]
        )
        for num_groups in GROUPS:
            server = Server(workload, _settings(num_groups), ENVIRONMENT)
            try:
                group = asyncio.run(_compare(server.url, workload, num_groups, group, table))
            finally:
                server.stop()
    table.caption, table.caption_justify = _caption(group), "left"
    return table


def _settings(num_groups: int) -> dict[str, object]:
    return {
        "num_speculative_tokens": NUM_DRAFTS,
        "speculation": "fixed",
        "run_ahead": "off",
        "max_num_seqs": MAX_NUM_SEQS,
        "autoscaling": {"min_replicas": num_groups},
    }


async def _compare(
    url: str, workload: Workload, num_groups: int, group: ServedGroup | None, table: Table
) -> ServedGroup:
    """Add the lines of so many replicas; fit the model first if there is none. Return it."""
    text = [token for prompt in workload.prompts for token in prompt] * 20
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        client = Client(session, text)
        await client.wait_for(num_groups)
        if group is None:
            group = await fit(client)
        for load in LOADS:
            arrivals = poisson(group.costs, load, num_groups=num_groups, num_arrivals=ARRIVALS_PER_GROUP * num_groups)
            answers = await client.open_loop(arrivals)
            measured = [answer.seconds for answer in answers]
            simulated = group.latencies_s(arrivals, [answer.num_rounds for answer in answers], num_groups)
            for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                real, said = np.quantile(measured, part), np.quantile(simulated, part)
                cells = f"{real:.3f}", f"{said:.3f}", f"{said / real:.2f}"
                table.add_row(str(num_groups), f"{load:.0%}", name, *cells)
            table.add_section()
    return group


async def fit(client: Client) -> ServedGroup:
    """Return the model of the one replica that serves."""
    rounds: list[tuple[float, float]] = []
    before = first = await client.read()
    for turn in range(NUM_TURNS + 1):
        for size in BATCHES:
            starts = [100 * turn + 10 * row for row in range(size)]
            await asyncio.gather(*(client.ask(start, USUAL_PROMPT, NUM_TOKENS) for start in starts))
            after = await client.read()
            num_rounds = after.num_decode_rounds - before.num_decode_rounds
            num_rows = (after.speculation.num_drafts - before.speculation.num_drafts) / num_rounds
            if turn:  # the first turn warms up
                rounds.append((num_rows, 1e3 * (after.seconds["round"] - before.seconds["round"]) / num_rounds))
            before = after
    stream_ms, round_ms = np.polyfit(*zip(*rounds, strict=True), 1)
    drafted = since(first.speculation, before.speculation)
    prompts_s = [
        [(await client.ask(50 * turn, length, 1)).seconds for turn in range(PROMPT_TURNS)] for length in PROMPT_LENGTHS
    ]
    prompt_round_s = ((await client.read()).all_rounds_s - before.all_rounds_s) / sum(map(len, prompts_s))
    short_s, long_s = map(float, np.median(prompts_s, axis=1))
    costs = GroupCosts(
        round_ms=float(round_ms),
        stream_ms=float(stream_ms),
        prompt_token_ms=1e3 * (long_s - short_s) / (PROMPT_LENGTHS[1] - PROMPT_LENGTHS[0]),
        tokens_per_round=1 + drafted.num_accepted_tokens / drafted.num_drafts,
        chunk_tokens=CHUNK_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
    )
    busy_s = costs.round_s(1, 0) / 2 + costs.round_s(1, USUAL_PROMPT) - prompt_round_s
    [model_s] = ServedGroup(costs, 0.0, 0.0).latencies_s([Arrival(0.0, PROMPT_LENGTHS[0], 1)], [0], 1)
    return ServedGroup(costs, short_s - model_s, busy_s)


def _caption(group: ServedGroup | None) -> str:
    assert group is not None
    costs = group.costs
    return (
        f"{NUM_DRAFTS} drafts. Round {costs.round_ms:.1f} ms + {costs.stream_ms:.2f} per stream + "
        f"{costs.prompt_token_ms:.3f} per prompt token, {costs.tokens_per_round:.2f} tokens per round; a request takes "
        f"{1e3 * group.added_s:.0f} ms besides, and {1e3 * group.busy_s:.0f} ms more where others run"
    )
