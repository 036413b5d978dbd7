"""FAULTS: whom each fault hits, and how."""

import contextlib
import math
import threading
from dataclasses import dataclass
from signal import SIGKILL, SIGSTOP, Signals
from typing import Literal

import psutil

from deployments.local.haproxy_variables import find_haproxy

Setup = Literal["one rank", "two ranks", "several nodes", "Redis"]
"""What a server is like: a target of one rank or of two, on one node; nodes for more than one group; or such
nodes and a Redis with the state of the head."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to one process, or the loss of its node.

    Attributes:
        name: what the report calls it.
        process: a part of the process's title, or the name of a program of Ray's.
        position: which of the processes with this title, the oldest first.
        resume_after_s: how long a process that is stopped (SIGSTOP) stays so; for ever if infinite.
        cuts_streams: whether the clients' connections end at this process, so that they must come back.
        takes_node: whether the whole node of the process is lost.
        setup: the server that it needs.
    """

    name: str
    process: str
    signal: Signals = SIGKILL
    resume_after_s: float = 0.0
    cuts_streams: bool = False
    takes_node: bool = False
    setup: Setup = "one rank"
    position: int = 0

    def strike(self, process: psutil.Process) -> None:
        if self.takes_node:
            _lose_node(process)
            return
        process.send_signal(self.signal)
        if self.signal is SIGSTOP and self.resume_after_s < math.inf:
            threading.Timer(self.resume_after_s, _resume, [process]).start()


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it was replaced meanwhile
        process.resume()


def _lose_node(process: psutil.Process) -> None:
    """Kill Ray's process of the node, which has started all others there, and those."""
    raylet = process.parent()
    assert raylet is not None
    for lost in [raylet, *raylet.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            lost.kill()


PROXY = "ProxyActor" if find_haproxy() is None else "HAProxyManager"
"""HAProxy ends with the process that has started it."""

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
        Fault("HTTP proxy SIGKILL", PROXY, cuts_streams=True),
        Fault("one of two target ranks SIGKILL", "TargetWorker", setup="two ranks"),
        Fault("the other rank SIGKILL", "TargetWorker", setup="two ranks", position=1),
        Fault("node of Router and target lost", ":Router", takes_node=True, setup="several nodes"),
        Fault("GCS SIGKILL", "gcs_server", setup="Redis"),
    )
}
