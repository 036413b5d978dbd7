"""The dashboard's queries, the alerts, and Prometheus' own programs to try them with."""

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import yaml

from tests.e2e.servers import Server, free_port
from tests.k8s.manifests import K8S, Manifest

FOLDER = K8S / "components" / "monitoring"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
WITHOUT_PROMETHEUS = "promtool and prometheus are in Debian's package prometheus"


def dashboard() -> Manifest:
    loaded: Manifest = json.loads((FOLDER / "dashboard.json").read_text())
    return loaded


def queries(*, window: str, namespace: str) -> dict[str, str]:
    """Return the dashboard's queries by panel and legend, over one window and for one namespace."""
    found = {}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", window).replace("$namespace", namespace)
            found[f"{panel['title']}: {target['legendFormat']}"] = query
    return found


def rule_groups() -> Manifest:
    """Return the groups of alerts, as Prometheus reads them from a file."""
    rule: Manifest = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    groups: Manifest = rule["spec"]
    return groups


def metric_names(query: str) -> set[str]:
    """Return the names of metrics in a query: words with a prefix that is ours, vLLM's or Ray's."""
    return set(re.findall(r"\b(?:vllm:|paceline:|ray_)\w+", query))


def write_rules(folder: Path) -> Path:
    """Write the alerts for Prometheus' programs."""
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump(rule_groups()))
    return path


class Prometheus:
    """What a real Prometheus knows."""

    def __init__(self, url: str) -> None:
        self._url = url

    def values(self, query: str) -> list[float]:
        """Return the numbers that a query has now; what is not a number is left out."""
        answer = httpx.get(f"{self._url}/api/v1/query", params={"query": query}).raise_for_status().json()
        values = [float(series["value"][1]) for series in answer["data"]["result"]]
        return [value for value in values if not math.isnan(value)]


@contextmanager
def prometheus(folder: Path, namespace: str, *targets: str) -> Iterator[Prometheus]:
    """Run a Prometheus with the alerts, which scrapes every three seconds, until the block ends.

    Samples get a label `namespace`, as the Prometheus operator adds it.
    """
    address = f"127.0.0.1:{free_port()}"
    static = {"targets": list(targets), "labels": {"namespace": namespace}}
    config = {
        # A scrape may take as long as the interval; one that takes longer leaves gauges without a value.
        "global": {"scrape_interval": "3s", "evaluation_interval": "3s"},
        "rule_files": [str(write_rules(folder))],
        "scrape_configs": [{"job_name": namespace, "static_configs": [static]}],
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
