"""FaultServer: the bundled pair as it is served, and its processes by name."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

import httpx
import psutil

from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET
from tests.bench.contestants.with_serve import Server
from tests.bench.workload import Cell, Workload
from tests.faults.streams import REQUESTS

APPEAR_TIMEOUT_S = 60.0
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class FaultServer(Server):
    """The application on a Ray cluster of its own."""

    def __init__(self, variables: Mapping[str, str] | None = None, **arguments: object) -> None:
        """Start it with the bundled pair; the arguments are the application's."""
        cells = [Cell(len(REQUESTS), 0.8)]
        pair = Workload(str(BUNDLED_TARGET), str(BUNDLED_DRAFT), "auto", "cpu", "auto", 1, [], cells)
        super().__init__(pair, arguments, variables)

    @property
    def root(self) -> psutil.Process:
        return psutil.Process(self.pid)

    def process(self, name: str, position: int = 0, timeout_s: float = APPEAR_TIMEOUT_S) -> psutil.Process:
        """Return the process of an actor, by a part of its title and by age; wait until there is one."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if len(found := self.processes(name)) > position:
                return found[position]
            time.sleep(0.1)
        raise RuntimeError(f"no process has {name!r} in its title")

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the actors that have `name` in their titles, or the programs of this name, the oldest first."""
        titles = [(process, title_of(process)) for process in self.root.children(recursive=True)]
        found = [process for process, title in titles if _is_called(title, name)]
        return sorted(found, key=lambda process: process.pid)

    def counts_by(self, name: str, label: str) -> dict[str, float]:
        """Return the samples of one name by the value of a label."""
        named = [(sample, value) for sample, value in self._samples() if sample.startswith(f"{name}{{")]
        return _sums((sample.partition(f'{label}="')[2].partition('"')[0], value) for sample, value in named)

    def metrics(self) -> dict[str, float]:
        """Return the samples of `/metrics`; those of one name are added."""
        return _sums((sample.partition("{")[0], value) for sample, value in self._samples())

    def _samples(self) -> list[tuple[str, float]]:
        lines = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text.splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return [(sample, float(value)) for sample, _, value in pairs]

    @property
    def num_resubmissions(self) -> float:
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


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for key, value in pairs:
        totals[key] += value
    return dict(totals)


def _is_called(title: str, name: str) -> bool:
    is_actor = title.startswith("ray::")
    return name in title if is_actor else title.partition(" ")[0].endswith(f"/{name}")


def title_of(process: psutil.Process) -> str:
    """Return a process's command line, which is the title that it has given itself; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
