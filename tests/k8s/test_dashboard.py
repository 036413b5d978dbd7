"""Every query of the dashboard has data in a real Prometheus that scrapes a server under load and under faults.

It scrapes `/metrics` and Ray's exporter as `monitoring` does, and Ray's exporter alone as `monitoring-by-ray` does.
"""

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.servers import START_S, Server
from tests.k8s.monitoring import PROMETHEUS, WITHOUT_PROMETHEUS, metric_names, queries, rule_groups
from tests.k8s.prometheus import Job, Prometheus, prometheus, ray_exporter, relabelings_by_ray

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(PROMETHEUS is None, reason=WITHOUT_PROMETHEUS),
]

STREAMS = 4
SETTINGS = ("run_ahead=on", "speculation=fixed", 'autoscaling={"max_replicas": 2}')
NAMESPACES = ("monitoring", "monitoring-by-ray")
DATA_S = 60
EXPORT_S = 60
"""How long Ray's exporter may lag behind: the exporting interval, Ray's own, and the time until it forgets the dead."""


class Scraped(NamedTuple):
    """A server that had load and faults, the address of its Ray's exporter, and who scraped both."""

    server: Server
    exporter: str
    database: Prometheus


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("scraped")
    server = Server(folder / "log", *SETTINGS)
    try:
        server.wait_until_ready()
        exporter = ray_exporter(server)
        jobs = (
            Job("monitoring", [server.url.removeprefix("http://"), exporter]),
            Job("monitoring-by-ray", [exporter], relabelings_by_ray()),
        )
        with prometheus(folder, *jobs) as database:
            asyncio.run(load_and_strike(server, database))
            yield Scraped(server, exporter, database)
    finally:
        server.kill()


async def load_and_strike(server: Server, database: Prometheus) -> None:
    """Load the server until all queries have data, or time is up; kill a Router and a draft meanwhile."""
    stop = asyncio.Event()
    async with (
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client,
        asyncio.TaskGroup() as streams,
    ):
        for _ in range(STREAMS):
            streams.create_task(load(client, stop))
        for title in (":Router", "DraftWorker"):  # resubmissions, and rounds without a draft
            await asyncio.sleep(5)
            (victim,) = server.processes(title)
            victim.send_signal(signal.SIGKILL)
            async with asyncio.timeout(START_S):
                while not set(server.processes(title)) - {victim}:
                    await asyncio.sleep(0.5)
            await asyncio.to_thread(server.wait_until_ready)
        deadline = time.monotonic() + DATA_S
        while any(without_data(database, namespace) for namespace in NAMESPACES) and time.monotonic() < deadline:
            await asyncio.sleep(1)
        stop.set()


async def load(client: openai.AsyncOpenAI, until: asyncio.Event) -> None:
    """Stream texts one after another until told to stop."""
    while not until.is_set():
        stream = await client.completions.create(model="paceline", prompt="Call me", max_tokens=64, stream=True)
        async for _ in stream:
            pass


def without_data(database: Prometheus, namespace: str) -> dict[str, str]:
    """Return the queries of the dashboard that have no number."""
    asked = queries(window="2m", namespace=namespace)
    return {panel: query for panel, query in asked.items() if not database.values(query)}


Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def figures(text: str) -> Figures:
    """Return the samples of `/metrics`."""
    families = text_string_to_metric_families(text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def figures_at_ray(text: str, label_names: set[str]) -> Figures:
    """Return the application's samples at Ray's exporter, with the names of `/metrics` and without Ray's labels."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if prefix := re.match("ray_(vllm|paceline)_", sample.name):
                labels = frozenset(label for label in sample.labels.items() if label[0] in label_names)
                samples[f"{prefix[1]}:{sample.name[prefix.end() :]}", labels] = sample.value
    return samples


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_query_has_data(scraped: Scraped, namespace: str) -> None:
    assert without_data(scraped.database, namespace) == {}


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_metric_of_an_alert_exists(scraped: Scraped, namespace: str) -> None:
    rules = [rule["expr"] for group in rule_groups()["groups"] for rule in group["rules"]]
    asked = {
        name: f'last_over_time({name}{{namespace="{namespace}"}}[1m])'
        for expression in rules
        for name in metric_names(expression)
    }
    assert [name for name, query in asked.items() if not scraped.database.values(query)] == []


def test_rays_exporter_has_all_figures(scraped: Scraped) -> None:
    deadline = time.monotonic() + EXPORT_S
    while True:
        ours = figures(httpx.get(f"{scraped.server.url}/metrics").text)
        label_names = {name for _, labels in ours for name, _ in labels}
        rays = figures_at_ray(httpx.get(f"http://{scraped.exporter}/metrics").text, label_names)
        if ours == rays or time.monotonic() > deadline:
            assert rays == ours
            return
        time.sleep(1)
