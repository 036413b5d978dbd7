"""A step in load as a picture: the queue, the decision and the replicas over time; and what moving requests gains.

All requests come at once, twice as many as one replica runs, and none comes after them. Those that wait begin when the
first ones end, or at the second replica, if they move there. The same is recorded of an Ingress that moves none. The
passes have the pace of GPUs, so the second replica takes nothing from the first.
"""

import asyncio
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import httpx
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ray import serve
from rich.console import Console
from rich.table import Table

from deployments.builder import app
from deployments.config import AppConfig, Autoscaling
from deployments.environment import serve_environment
from deployments.ingress.ingress import Ingress
from tests.bench.light_pair import make_light_pair
from tests.bench.paced import ENVIRONMENT, PAIR
from tests.bench.pictures import INK, STYLE, save
from tests.e2e.replicas import routers
from tests.e2e.servers import serve_on_ray

MAX_NUM_SEQS = 8
STEP = 2 * MAX_NUM_SEQS
NUM_TOKENS = 3500
"""Half a minute of a stream."""
DOWNSCALE_DELAY_S = 8.0
NUM_CPUS = 2
"""Logical ones: for two replicas and an Ingress."""
BEFORE_S = 3.0
SAMPLE_S = 0.2
LONGEST_RUN_S = 180.0
COLOURS = ("#2f86c9", "#8fc1d6", "#d9722e")
ARMS = {"waiting requests move": True, "they stay": False}


class StayingIngress(Ingress):
    """An Ingress that moves no request."""

    async def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Start it, and end what would move them."""
        await super().__init__(*arguments, **settings)
        self._routers._mover._task.cancel()


@dataclass(frozen=True, slots=True)
class Sample:
    """The service at one time, in seconds since the step."""

    time_s: float
    running: dict[str, float]
    """Requests that run, by replica."""
    num_waiting: float
    num_wanted: int
    num_serving: int


@dataclass(frozen=True, slots=True)
class Recording:
    """A step in load and what came of it; times in seconds since the step."""

    samples: list[Sample]
    first_tokens_s: list[float]
    ended_s: float
    """When the last request ended."""

    @property
    def decided_s(self) -> float:
        """When a second replica was wanted."""
        return next(sample.time_s for sample in self.samples if sample.num_wanted == 2)

    @property
    def second_s(self) -> float:
        """When a second replica served."""
        return next(sample.time_s for sample in self.samples if sample.num_serving == 2)

    @property
    def back_after_s(self) -> float:
        """How long after the end of the last request one replica was left."""
        return next(s.time_s for s in reversed(self.samples) if s.num_serving == 2) - self.ended_s

    @property
    def waited_s(self) -> list[float]:
        """The times to the first token of the requests that did not begin at once."""
        return sorted(self.first_tokens_s)[MAX_NUM_SEQS:]


def autoscaling(png: Path, console: Console) -> None:
    """Record both arms, print their figures and draw them."""
    os.environ |= ENVIRONMENT
    recordings = {}
    with TemporaryDirectory(prefix="paceline-pair-") as folder:
        target, draft = map(str, make_light_pair(Path(folder)))
        for name, may_move in ARMS.items():
            with console.status(name):
                recordings[name] = _record(target, draft, may_move=may_move)
    console.print(table(recordings))
    draw(recordings, png)
    console.print(f"{png}")


def table(recordings: dict[str, Recording]) -> Table:
    """Return the figures of each arm."""
    title = f"{STEP} requests at once, {MAX_NUM_SEQS} run on a replica; seconds"
    result = Table(title=title, caption=f"Passes at the pace of {PAIR}", caption_justify="left")
    columns = ("", "decision", "second serves", "waiting: median first token", "last", "all done", "one replica after")
    for column in columns:
        result.add_column(column, justify="right" if column else "left")
    for name, recording in recordings.items():
        times = recording.decided_s, recording.second_s, median(recording.waited_s), recording.waited_s[-1]
        times += recording.ended_s, recording.back_after_s
        result.add_row(name, *(f"{value:.1f}" for value in times))
    return result


@rc_context(STYLE)
def draw(recordings: dict[str, Recording], png: Path) -> None:
    """Draw requests and replicas over time, a column for each arm."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(2, len(recordings), sharex=True, sharey="row", height_ratios=(2, 1), squeeze=False)
    for (name, recording), (upper, lower) in zip(recordings.items(), axes.T, strict=True):
        _draw_requests(upper, recording)
        _draw_replicas(lower, recording)
        upper.set_title(name)
        lower.set_xlabel("seconds since the step")
    axes[0, 0].set(ylabel="requests", yticks=range(0, STEP + 1, 4))
    axes[1, 0].set(ylabel="replicas", yticks=(0, 1, 2), ylim=(0, 2.3))
    figure.legend(handles=_legend(axes[0, 0], axes[1, 0]), loc="outside lower center", ncols=5)
    save(figure, png)


def _legend(*axes: Axes) -> list[Artist]:
    return [handle for one in axes for handle in one.get_legend_handles_labels()[0]]


def _draw_requests(axes: Axes, recording: Recording) -> None:
    replicas = list(dict.fromkeys(name for sample in recording.samples for name in sample.running))
    rows = [[sample.running.get(name, 0.0) for sample in recording.samples] for name in replicas]
    rows.append([sample.num_waiting for sample in recording.samples])
    labels = [*("requests that run on the first", "on the second")[: len(replicas)], "that wait"]
    colours = [*COLOURS[: len(replicas)], COLOURS[-1]]
    axes.stackplot([sample.time_s for sample in recording.samples], *rows, labels=labels, colors=colours, step="post")
    axes.grid()


def _draw_replicas(axes: Axes, recording: Recording) -> None:
    times = [sample.time_s for sample in recording.samples]
    wanted = [sample.num_wanted for sample in recording.samples]
    serving = [sample.num_serving for sample in recording.samples]
    axes.fill_between(times, serving, step="post", color=INK, alpha=0.35, linewidth=0, label="replicas that serve")
    axes.step(times, wanted, where="post", color=COLOURS[-1], label="replicas wanted")
    axes.grid()


def _record(target: str, draft: str, *, may_move: bool) -> Recording:
    config = AppConfig(
        target_model=target,
        draft_model=draft,
        device=f"paced:{PAIR}",
        compile="off",
        dtype="float32",
        max_num_seqs=MAX_NUM_SEQS,
        speculation="fixed",
        autoscaling=Autoscaling(max_replicas=2, requests_per_replica=MAX_NUM_SEQS, downscale_delay_s=DOWNSCALE_DELAY_S),
    )
    variables = {**serve_environment(config), **ENVIRONMENT}
    with (
        patch("deployments.builder.Ingress", Ingress if may_move else StayingIngress),
        serve_on_ray(NUM_CPUS, variables, shows_log=False) as url,
    ):
        serve.run(app(config))
        return asyncio.run(_step(url))


async def _step(url: str) -> Recording:
    samples: list[Sample] = []
    async with httpx.AsyncClient(base_url=url, timeout=LONGEST_RUN_S) as client, asyncio.timeout(LONGEST_RUN_S):
        await _first_token_s(client, 0, num_tokens=8)
        begin_s = time.monotonic() + BEFORE_S
        sampling = asyncio.create_task(_sample(client, samples, begin_s))
        await asyncio.sleep(BEFORE_S)
        first_tokens_s = await asyncio.gather(*(_first_token_s(client, seed) for seed in range(STEP)))
        ended_s = time.monotonic() - begin_s
        while await routers() != (1, 1):
            await asyncio.sleep(SAMPLE_S)
        await asyncio.sleep(BEFORE_S)
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
    return Recording(samples, first_tokens_s, ended_s)


async def _first_token_s(client: httpx.AsyncClient, seed: int, num_tokens: int = NUM_TOKENS) -> float:
    """Read a whole stream; return how long its first token took."""
    body = {"prompt": f"This PEP proposes {seed}", "max_tokens": num_tokens, "seed": seed, "ignore_eos": True}
    started, first_s = time.monotonic(), 0.0
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.monotonic() - started
                if "error" in (event := json.loads(line.removeprefix("data: "))):
                    raise RuntimeError(str(event["error"]))
    return first_s


async def _sample(client: httpx.AsyncClient, samples: list[Sample], begin_s: float) -> None:
    """Look at the service again and again, until cancelled."""
    while True:
        num_wanted, num_serving = await routers()
        text = (await client.get("/metrics")).text
        running, waiting = (_by_replica(text, f"vllm:num_requests_{state}") for state in ("running", "waiting"))
        now_s = time.monotonic() - begin_s
        samples.append(Sample(now_s, running, sum(waiting.values()), num_wanted, num_serving))
        await asyncio.sleep(SAMPLE_S)


def _by_replica(metrics: str, name: str) -> dict[str, float]:
    pairs: list[tuple[str, str]] = re.findall(rf'^{name}{{.*replica="([^"]*)".*}} (\S+)$', metrics, re.MULTILINE)
    return {replica: float(value) for replica, value in pairs}
