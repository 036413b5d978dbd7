"""Chaos: a random fault every second or two; a heavy one only once the service has recovered from the last."""

import asyncio
import math
import random
from collections import Counter
from signal import SIGKILL, SIGSTOP

import psutil

from tests.faults.faults import Fault
from tests.faults.load import Load
from tests.faults.server import FaultServer

PAUSE_S = (1.0, 2.0)
STOPPED_S = (0.2, 3.0)
BURST_SIZES = (8, 60)
RECOVERED_AFTER = 5
"""Answers after a heavy fault, at which the service counts as recovered."""
IMPATIENCE = 0.15
"""How often a heavy fault does not wait for that."""

_LIGHT = {"burst": 3.0, "draft SIGKILL": 3.0, "draft SIGSTOP": 3.0, "target SIGSTOP": 2.0, "Router SIGSTOP": 1.0}
_HEAVY = {
    "target SIGKILL": 2.0,
    "Router SIGKILL": 2.0,
    "Serve controller SIGKILL": 0.5,
    "draft hangs": 1.0,
    "target hangs": 1.0,
    "Router hangs": 1.0,
}
"""A process that hangs is stopped until somebody kills it."""
_PROCESSES = {
    "draft": "DraftWorker",
    "target": "TargetWorker",
    "Router": ":Router",
    "Serve controller": "ServeController",
}


class Chaos:
    """Strikes a server under load until it is told to stop.

    Attributes:
        strikes: how often each fault came.
        num_missed: faults whose process was not there, for it was just being replaced.
    """

    def __init__(self, server: FaultServer, load: Load, choices: random.Random) -> None:
        self._server = server
        self._load = load
        self._choices = choices
        self._num_answers = -RECOVERED_AFTER
        self._bursts: set[asyncio.Task[None]] = set()
        self.strikes: Counter[str] = Counter()
        self.num_missed = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._choices.uniform(*PAUSE_S))
            await self._strike(self._choose())

    async def finish(self) -> None:
        await asyncio.gather(*self._bursts)

    def _choose(self) -> str:
        has_recovered = self._load.outcomes["same"] >= self._num_answers + RECOVERED_AFTER
        weights = _LIGHT | _HEAVY if has_recovered or self._choices.random() < IMPATIENCE else {**_LIGHT}
        if not has_recovered:
            # The Router may be starting. Serve waits for ever for one that hangs before its constructor runs.
            weights.pop("Router hangs", None)
        if self._bursts:  # while nothing is answered, more of them would only wait
            del weights["burst"]
        return self._choices.choices([*weights], [*weights.values()])[0]

    async def _strike(self, name: str) -> None:
        if name == "burst":
            burst = asyncio.create_task(self._load.burst(self._choices.randint(*BURST_SIZES)))
            self._bursts.add(burst)
            burst.add_done_callback(self._bursts.discard)
        else:
            victim, _, kind = name.rpartition(" ")
            stopped_s = math.inf if kind == "hangs" else self._choices.uniform(*STOPPED_S)
            signal = SIGKILL if kind == "SIGKILL" else SIGSTOP
            fault = Fault(name, _PROCESSES[victim], signal, stopped_s)
            try:
                process = next(iter(await asyncio.to_thread(self._server.processes, fault.process)))
                fault.strike(process)
            except (StopIteration, psutil.NoSuchProcess):
                self.num_missed += 1
                return
        self.strikes[name] += 1
        if name in _HEAVY:
            self._num_answers = self._load.outcomes["same"]
