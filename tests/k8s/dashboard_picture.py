"""`python -m tests.k8s.dashboard_picture`: draw Grafana's dashboard, from a server under load and faults.

It starts a server with the bundled pair and a Prometheus, sends load for three minutes, kills the draft worker and the
target meanwhile, and draws what the queries of each panel returned, in the dashboard's places, with its titles, units
and legends. matplotlib draws it instead of Grafana. Passes take as long as those of a large pair on GPUs, because
drafts do not pay for the bundled pair on a few cores. It takes four minutes and writes `k8s/plots/dashboard.png`.
"""

import asyncio
import itertools
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from math import nan
from pathlib import Path

import openai
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from engine.execution.paced.device import VARIABLE as PACED_VARIABLE
from tests.bench.pictures import INK, STYLE, save
from tests.e2e.servers import Server
from tests.k8s.manifests import K8S, Manifest
from tests.k8s.monitoring import dashboard
from tests.k8s.prometheus import Job, Prometheus, Series, prometheus, ray_exporter
from tests.load.picture import COLOURS
from tests.load.prompts import Prompt, read_prompts

PNG = K8S / "plots" / "dashboard.png"
SETTINGS = ("device=paced:h100x4-70b+h100-1b", "run_ahead=on", "compile=auto", 'autoscaling={"max_replicas": 2}')
PHASES = ((45, 2), (45, 8), (45, 40), (45, 4))
"""Seconds, and users during them."""
FAULTS = {65: "DraftWorker", 155: "TargetWorker"}
"""What is killed, by seconds from the start of the load."""
WINDOW = "15s"
"""Stands for Grafana's `$__rate_interval`, which is four scrapes or more; here there is one every three seconds."""
NAMESPACE = "picture"
WIDTH_IN = 9.0
UNIT_IN = 0.25
"""Height of a unit of the dashboard's grid, of which a panel has eight."""
COLUMNS = 24


async def main() -> None:
    """Serve, load, draw."""
    with tempfile.TemporaryDirectory(prefix="paceline-dashboard-") as name:
        folder = Path(name)
        os.environ[PACED_VARIABLE] = "1"
        server = Server(folder / "log", *SETTINGS)
        try:
            await asyncio.to_thread(server.wait_until_ready)
            targets = (server.url.removeprefix("http://"), await asyncio.to_thread(ray_exporter, server))
            with prometheus(folder, Job(NAMESPACE, targets)) as database:
                start_s = time.time()
                await load(server)
                draw(database, start_s, time.time(), PNG)
        finally:
            server.kill()
    sys.stdout.write(f"written: {PNG}\n")


async def load(server: Server) -> None:
    """Send the load of all phases, and kill what `FAULTS` names."""
    prompts = itertools.cycle(read_prompts(["bundled"], seed=0))
    async with (
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for after_s, title in FAULTS.items():
            tasks.create_task(kill(server, after_s, title))
        for duration_s, num_users in PHASES:
            deadline = time.monotonic() + duration_s
            for _ in range(num_users):
                tasks.create_task(be_a_user(client, prompts, deadline))
            await asyncio.sleep(duration_s)


async def be_a_user(client: openai.AsyncOpenAI, prompts: Iterator[Prompt], deadline: float) -> None:
    """Ask for one text after another until a time of the monotonic clock."""
    while time.monotonic() < deadline:
        prompt = next(prompts).content
        assert isinstance(prompt, str)
        stream = await client.completions.create(
            model="paceline", prompt=prompt, max_tokens=128, temperature=0.7, stream=True
        )
        async for _ in stream:
            pass


async def kill(server: Server, after_s: float, title: str) -> None:
    """Kill a process of the server after some seconds."""
    await asyncio.sleep(after_s)
    server.processes(title)[0].send_signal(signal.SIGKILL)


@rc_context(STYLE)
def draw(database: Prometheus, start_s: float, end_s: float, png: Path) -> None:
    """Draw all panels over the time between two Unix times, in the dashboard's grid."""
    panels = dashboard()["panels"]
    num_units = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(WIDTH_IN, UNIT_IN * num_units))
    for panel in panels:
        x, y, width, height = (panel["gridPos"][name] for name in "xywh")
        if panel["type"] == "row":
            figure.text(0.01, 1 - (y + 0.8) / num_units, panel["title"], fontsize=11, fontweight="bold")
            continue
        # Above the axes there is room for the title, below them for the times and the legend.
        left, bottom = x / COLUMNS + 0.055, 1 - (y + height - 2) / num_units
        axes = figure.add_axes((left, bottom, width / COLUMNS - 0.065, (height - 3.2) / num_units))
        axes.set_title(panel["title"], loc="left", fontsize=9)
        draw_series(axes, panel["targets"], database, start_s, end_s)
        format_axes(axes, panel["fieldConfig"]["defaults"], end_s - start_s)
    save(figure, png)


def draw_series(axes: Axes, targets: list[Manifest], database: Prometheus, start_s: float, end_s: float) -> None:
    """Draw what the queries of a panel returned."""
    seconds = range(round(end_s - start_s) + 1)
    colours = itertools.cycle(COLOURS)
    for target in targets:
        query = target["expr"].replace("$__rate_interval", WINDOW).replace("$namespace", NAMESPACE)
        for series in database.series(query, start_s, end_s):
            values = {round(time_s - start_s): value for time_s, value in series.points}
            label = legend(target["legendFormat"], series)
            # matplotlib leaves a gap where there is no number, as Grafana does.
            axes.plot(seconds, [values.get(second, nan) for second in seconds], color=next(colours), lw=1, label=label)


def legend(template: str, series: Series) -> str:
    """Return the name of a series: the template with the series' labels."""
    return re.sub(r"{{(\w+)}}", lambda match: series.labels.get(match[1], ""), template)


def format_axes(axes: Axes, defaults: Manifest, duration_s: float) -> None:
    """Give a panel its unit, its limits, its legend, and a dotted line at each fault."""
    for fault_s in FAULTS:
        axes.axvline(fault_s, color=INK, linestyle=":", linewidth=0.8)
    axes.set(xlim=(0, duration_s), ylim=(defaults.get("min"), defaults.get("max")))
    axes.set_xticks(range(0, int(duration_s) + 1, 60))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value // 60:.0f}:{value % 60:02.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if defaults["unit"] == "percentunit":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    elif defaults["unit"] == "s":
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms")
        )
    axes.tick_params(labelsize=7, length=2)
    axes.grid()
    axes.legend(
        fontsize=7,
        ncols=5,
        loc="upper left",
        bbox_to_anchor=(-0.01, -0.14),
        borderpad=0,
        borderaxespad=0.2,
        handlelength=0.8,
        handletextpad=0.4,
        columnspacing=0.9,
        labelspacing=0.2,
    )


if __name__ == "__main__":
    asyncio.run(main())
