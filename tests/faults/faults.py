"""FAULTS: whom each fault hits, and how."""

import contextlib
import math
import threading
from dataclasses import dataclass
from signal import SIGKILL, SIGSTOP, Signals

import psutil


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to one process.

    Attributes:
        name: what the report calls it.
        process: a part of the process's title.
        resume_after_s: how long a process that is stopped (SIGSTOP) stays so; for ever if infinite.
        cuts_streams: whether the clients' connections end at this process, so that they must send requests again.
    """

    name: str
    process: str
    signal: Signals = SIGKILL
    resume_after_s: float = 0.0
    cuts_streams: bool = False

    def strike(self, process: psutil.Process) -> None:
        """Send the signal."""
        process.send_signal(self.signal)
        if self.signal is SIGSTOP and self.resume_after_s < math.inf:
            threading.Timer(self.resume_after_s, _resume, [process]).start()


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it was replaced meanwhile
        process.resume()


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("draft SIGKILL", "DraftWorker"),
        Fault("draft SIGSTOP for 3 s", "DraftWorker", SIGSTOP, 3.0),
        Fault("draft hangs", "DraftWorker", SIGSTOP, math.inf),
        Fault("target SIGKILL", "TargetWorker"),
        Fault("target hangs", "TargetWorker", SIGSTOP, math.inf),
        Fault("Router SIGKILL", ":Router"),
        Fault("Router hangs", ":Router", SIGSTOP, math.inf),
        Fault("Serve controller SIGKILL", "ServeController"),
        Fault("Ingress SIGKILL", ":Ingress", cuts_streams=True),
        Fault("HTTP proxy SIGKILL", "ProxyActor", cuts_streams=True),
    )
}
