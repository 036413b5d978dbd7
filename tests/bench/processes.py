"""The processes of a served application (Linux): freezing them, and the CPU time that each takes.

An application without requests still takes a sixth of a core: Ray's and Serve's processes look after each other. Where
several are measured in turn, those whose turn it is not are frozen.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROC = Path("/proc")
TITLES = {
    "Router": "Router",
    "Ingress": "Ingress",
    "ProxyActor": "proxy",
    "HAProxyManager": "proxy",
    "haproxy.cfg": "proxy",
    "DraftWorker": "draft",
    "TargetWorker": "target",
}
"""What the titles of processes contain, and how these are called here; all others are Ray's."""
NAMES = (*dict.fromkeys(TITLES.values()), "Ray")


def freeze(root_pid: int) -> None:
    """Stop a process and all its descendants, those too that were begun meanwhile."""
    stopped: set[int] = set()
    while new := {root_pid, *_descendants(root_pid)} - stopped:
        _signal(new, signal.SIGSTOP)
        stopped |= new


def thaw(root_pid: int) -> None:
    """Let a frozen process and its descendants go on."""
    _signal({root_pid, *_descendants(root_pid)}, signal.SIGCONT)


@contextmanager
def stopped(root_pid: int, name: str) -> Iterator[None]:
    """Stop the descendants of one of `NAMES` while the block runs."""
    pids = {pid for pid in _descendants(root_pid) if _name(pid) == name}
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def cpu_seconds(root_pid: int) -> dict[str, float]:
    """Return the CPU time, user and system, that a process and its descendants have taken, by `NAMES`."""
    seconds = dict.fromkeys(NAMES, 0.0)
    for pid in {root_pid, *_descendants(root_pid)}:
        seconds[_name(pid)] += sum(map(int, _stat(pid)[11:13])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, number)


def _descendants(root_pid: int) -> set[int]:
    parents = {int(path.name): int(_stat(int(path.name))[1]) for path in PROC.iterdir() if path.name.isdigit()}
    found = {root_pid}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {root_pid}


def _name(pid: int) -> str:
    title = _title(pid)
    return next((name for part, name in TITLES.items() if part in title), "Ray")


def _stat(pid: int) -> list[str]:
    """Return the fields of a process after its name, zeros if it has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["0"] * 50


def _title(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
