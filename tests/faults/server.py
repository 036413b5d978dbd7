"""FaultServer: the bundled pair as it is served, and its processes by name."""

import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from deployments.diagnosis.http_client import Metrics
from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET
from tests.bench.contestants.with_serve import Server
from tests.bench.workload import Cell, Workload
from tests.e2e.servers import metrics
from tests.faults.streams import REQUESTS
from tests.waiting import wait_until

APPEAR_TIMEOUT_S, EMPTY_TIMEOUT_S = 60.0, 10.0
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

    def process(self, name: str, position: int = 0) -> psutil.Process:
        """Return the process of an actor, by a part of its title and by age; wait until there is one."""
        deadline = time.monotonic() + APPEAR_TIMEOUT_S
        while len(found := self.processes(name)) <= position:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no process has {name!r} in its title")
            time.sleep(0.1)
        return found[position]

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the actors that have `name` in their titles, or the programs of this name, the oldest first."""
        titles = [(process, title_of(process)) for process in self.root.children(recursive=True)]
        found = [process for process, title in titles if _is_called(title, name)]
        return sorted(found, key=lambda process: process.pid)

    def metrics(self) -> Metrics:
        return metrics(self.url)

    @property
    def num_resubmissions(self) -> float:
        return self.metrics().total("paceline:resubmissions_total")

    def what_is_left(self) -> dict[str, float]:
        """Return the gauges that are not zero, although no request is open."""

        def left() -> dict[str, float]:
            shown = self.metrics()
            return {name: shown.total(name) for name in GAUGES if shown.total(name)}

        with suppress(TimeoutError):
            wait_until(lambda: not left(), EMPTY_TIMEOUT_S)
        return left()


def _is_called(title: str, name: str) -> bool:
    is_actor = title.startswith("ray::")
    return name in title if is_actor else title.partition(" ")[0].endswith(f"/{name}")


def title_of(process: psutil.Process) -> str:
    """Return a process's command line, which is the title that it has given itself; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
