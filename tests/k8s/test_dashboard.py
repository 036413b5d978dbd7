"""Every query of the dashboard has data in a real Prometheus that scrapes a server under load and under faults.

It scrapes `/metrics` and Ray's exporter, as `monitoring` does.
"""

import asyncio
import signal
import time
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.servers import START_S, Server
from tests.k8s.monitoring import (
    PROMETHEUS,
    WITHOUT_PROMETHEUS,
    Prometheus,
    metric_names,
    prometheus,
    queries,
    ray_exporter,
    rule_groups,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(PROMETHEUS is None, reason=WITHOUT_PROMETHEUS),
]

STREAMS = 4
SETTINGS = ("run_ahead=on", "speculation=fixed", 'autoscaling={"max_replicas": 2}')
NAMESPACE = "monitoring"
DATA_S = 60


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("scraped")
    server = Server(folder / "log", *SETTINGS)
    try:
        server.wait_until_ready()
        targets = (server.url.removeprefix("http://"), ray_exporter(server))
        with prometheus(folder, NAMESPACE, *targets) as database:
            asyncio.run(load_and_strike(server, database))
            yield database
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
        while without_data(database) and time.monotonic() < deadline:
            await asyncio.sleep(1)
        stop.set()


async def load(client: openai.AsyncOpenAI, until: asyncio.Event) -> None:
    while not until.is_set():
        stream = await client.completions.create(model="paceline", prompt="Call me", max_tokens=64, stream=True)
        async for _ in stream:
            pass


def without_data(database: Prometheus) -> dict[str, str]:
    asked = queries(window="2m", namespace=NAMESPACE)
    return {panel: query for panel, query in asked.items() if not database.values(query)}


def test_every_query_has_data(database: Prometheus) -> None:
    assert without_data(database) == {}


def test_every_metric_of_an_alert_exists(database: Prometheus) -> None:
    rules = [rule["expr"] for group in rule_groups()["groups"] for rule in group["rules"]]
    asked = {
        name: f'last_over_time({name}{{namespace="{NAMESPACE}"}}[1m])'
        for expression in rules
        for name in metric_names(expression)
    }
    assert [name for name, query in asked.items() if not database.values(query)] == []
