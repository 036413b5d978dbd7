"""FaultServer: the bundled pair as it is served, and its processes by name."""

import time

import httpx
import psutil

from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET
from tests.bench.with_serve import Server
from tests.bench.workload import Cell, Workload
from tests.faults.streams import REQUESTS

APPEAR_TIMEOUT_S = 60.0
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class FaultServer(Server):
    """The application on a Ray cluster of its own."""

    def __init__(self, **arguments: object) -> None:
        """Start it with the bundled pair; `arguments` are the application's."""
        pair = Workload(
            str(BUNDLED_TARGET), str(BUNDLED_DRAFT), "auto", "cpu", "auto", 1, [], [Cell(len(REQUESTS), 0.8)]
        )
        super().__init__(pair, arguments)

    def process(self, name: str) -> psutil.Process:
        """Return the process of an actor, by a part of its title; wait until there is one."""
        deadline = time.monotonic() + APPEAR_TIMEOUT_S
        while time.monotonic() < deadline:
            for process in psutil.Process(self.pid).children(recursive=True):
                try:
                    title = " ".join(process.cmdline())
                except psutil.NoSuchProcess:
                    continue
                if title.startswith("ray::") and name in title:
                    return process
            time.sleep(0.1)
        raise RuntimeError(f"no process has {name!r} in its title")

    def metrics(self) -> dict[str, float]:
        """Return the samples of `/metrics`; those of one name are added."""
        totals: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics").raise_for_status().text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    @property
    def num_resubmissions(self) -> float:
        """How many requests were sent to a Router again."""
        return self.metrics().get("paceline:resubmissions_total", 0.0)

    def what_is_left(self, timeout_s: float = 10.0) -> dict[str, float]:
        """Return the gauges that are not zero, although no request is open."""
        deadline = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            left = {name: metrics[name] for name in GAUGES if metrics[name]}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)
