"""Every query of the dashboard has data in a real Prometheus that scrapes a server under load and under faults."""

import asyncio
import math
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import yaml

from tests.e2e.servers import Server, free_port
from tests.k8s.monitoring import PROMETHEUS, WITHOUT_PROMETHEUS, metric_names, queries, rule_groups, write_rules

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(PROMETHEUS is None, reason=WITHOUT_PROMETHEUS),
]

STREAMS = 4
SETTINGS = ("run_ahead=on", "speculation=fixed", 'autoscaling={"max_replicas": 2}')
DATA_S = 60


class Prometheus:
    """A Prometheus that scrapes a server and Ray's exporter every second."""

    def __init__(self, url: str) -> None:
        self._url = url

    def values(self, query: str) -> list[float]:
        """Return the numbers that a query has now; what is not a number is left out."""
        answer = httpx.get(f"{self._url}/api/v1/query", params={"query": query}).raise_for_status().json()
        values = [float(series["value"][1]) for series in answer["data"]["result"]]
        return [value for value in values if not math.isnan(value)]


@contextmanager
def prometheus(folder: Path, *targets: str) -> Iterator[Prometheus]:
    address = f"127.0.0.1:{free_port()}"
    labels = {"namespace": "test"}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(write_rules(folder))],
        "scrape_configs": [
            {"job_name": "paceline", "static_configs": [{"targets": list(targets), "labels": labels}]},
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [str(PROMETHEUS), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait()


def ray_exporter(server: Server) -> str:
    """Return the address of Ray's exporter, which is one of the ports that the server's processes listen on."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in psutil.Process(server.process.pid).children(recursive=True):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and exports_ray(
                    address := f"127.0.0.1:{connection.laddr.port}"
                ):
                    return address
        time.sleep(1)
    raise AssertionError("Ray exports no metrics")


def exports_ray(address: str) -> bool:
    try:
        answer = httpx.get(f"http://{address}/metrics", timeout=2)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and "ray_serve_autoscaling_target_replicas" in answer.text


async def load(client: openai.AsyncOpenAI, until: asyncio.Event) -> None:
    """Stream texts one after another until told to stop."""
    while not until.is_set():
        stream = await client.completions.create(model="paceline", prompt="Call me", max_tokens=64, stream=True)
        async for _ in stream:
            pass


def kill(server: Server, title: str) -> None:
    server.processes(title)[0].send_signal(signal.SIGKILL)


async def test_every_query_has_data(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", *SETTINGS)
    try:
        await asyncio.to_thread(server.wait_until_ready)
        exporter = await asyncio.to_thread(ray_exporter, server)
        with prometheus(tmp_path, server.url.removeprefix("http://"), exporter) as database:
            stop = asyncio.Event()
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:
                streams = [asyncio.create_task(load(client, stop)) for _ in range(STREAMS)]
                for title in (":Router", "DraftWorker"):  # resubmissions, and rounds without a draft
                    await asyncio.sleep(5)
                    kill(server, title)
                    await asyncio.to_thread(server.wait_until_ready)
                missing = dict(queries(window="2m"))
                deadline = time.monotonic() + DATA_S
                while missing and time.monotonic() < deadline:
                    await asyncio.sleep(1)
                    missing = {panel: query for panel, query in missing.items() if not database.values(query)}
                stop.set()
                await asyncio.gather(*streams)
            assert missing == {}
            named = {
                name
                for group in rule_groups()["groups"]
                for rule in group["rules"]
                for name in metric_names(rule["expr"])
            }
            assert [name for name in sorted(named) if not database.values(name)] == []
    finally:
        server.kill()
