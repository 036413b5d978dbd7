"""A real Prometheus that scrapes a server and Ray's exporter every three seconds, and what it answers."""

import math
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.e2e.servers import Server, free_port
from tests.k8s.manifests import K8S
from tests.k8s.monitoring import PROMETHEUS, write_rules


@dataclass(frozen=True, slots=True)
class Job:
    """What is scraped; its samples get a label `namespace`, as the Prometheus operator adds it."""

    namespace: str
    targets: Sequence[str]
    relabelings: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a graph."""

    labels: dict[str, str]
    points: list[tuple[float, float]]
    """Unix times and values."""


class Prometheus:
    """What a Prometheus knows."""

    def __init__(self, url: str) -> None:
        self._url = url

    def values(self, query: str) -> list[float]:
        """Return the numbers that a query has now; what is not a number is left out."""
        values = [float(series["value"][1]) for series in self._ask("query", query=query)]
        return [value for value in values if not math.isnan(value)]

    def series(self, query: str, start_s: float, end_s: float) -> list[Series]:
        """Return what a query had in each second between two Unix times; what is not a number is left out."""
        answer = self._ask("query_range", query=query, start=start_s, end=end_s, step=1)
        return [
            Series(
                series["metric"],
                [(time_s, value) for time_s, text in series["values"] if not math.isnan(value := float(text))],
            )
            for series in answer
        ]

    def _ask(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self._url}/api/v1/{path}", params=parameters).raise_for_status().json()
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


@contextmanager
def prometheus(folder: Path, *jobs: Job) -> Iterator[Prometheus]:
    """Run a Prometheus with the alerts until the block ends."""
    address = f"127.0.0.1:{free_port()}"
    config = {
        # A scrape may take as long as the interval; one that takes longer leaves gauges without a value.
        "global": {"scrape_interval": "3s", "evaluation_interval": "3s"},
        "rule_files": [str(write_rules(folder))],
        "scrape_configs": [
            {
                "job_name": job.namespace,
                "static_configs": [{"targets": list(job.targets), "labels": {"namespace": job.namespace}}],
                "metric_relabel_configs": list(job.relabelings),
            }
            for job in jobs
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


def relabelings_by_ray() -> list[dict[str, Any]]:
    """Return the relabelings of `monitoring-by-ray`, as a Prometheus' configuration has them."""
    monitor = yaml.safe_load((K8S / "components" / "monitoring-by-ray" / "podmonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return [{names.get(name, name): value for name, value in rule.items()} for rule in endpoint["metricRelabelings"]]


def ray_exporter(server: Server) -> str:
    """Return the address of Ray's exporter, which is one of the ports that the server's processes listen on."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in psutil.Process(server.process.pid).children(recursive=True):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and _exports_ray(
                    address := f"127.0.0.1:{connection.laddr.port}"
                ):
                    return address
        time.sleep(1)
    raise AssertionError("Ray exports no metrics")


def _exports_ray(address: str) -> bool:
    try:
        answer = httpx.get(f"http://{address}/metrics", timeout=2)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and "ray_serve_autoscaling_target_replicas" in answer.text
