"""Pinning and freezing the processes of a served application (Linux).

An application that nobody asks anything still takes a sixth of a core: Ray's and Serve's processes look after each
other. Where several are measured in turn, those whose turn it is not are frozen.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def pin_workers(root_pid: int) -> None:
    """Put the draft worker and the target worker among a process's descendants on the first and the last core.

    Raises:
        RuntimeError: there are fewer than two cores, or no target worker.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError(f"pinning needs 2 cores, this process may use {len(cores)}")
    pinned = []
    for pid in _descendants(root_pid):
        for title, core in (("ray::DraftWorker", cores[0]), ("ray::TargetWorker", cores[-1])):
            if _title(pid).startswith(title):
                _pin(pid, core)
                pinned.append(title)
    if "ray::TargetWorker" not in pinned:
        raise RuntimeError(f"process {root_pid} has no target worker")


def freeze(root_pid: int) -> None:
    """Stop a process and all its descendants, those too that were begun meanwhile."""
    stopped: set[int] = set()
    while new := {root_pid, *_descendants(root_pid)} - stopped:
        _signal(new, signal.SIGSTOP)
        stopped |= new


def thaw(root_pid: int) -> None:
    """Let a frozen process and its descendants go on."""
    _signal({root_pid, *_descendants(root_pid)}, signal.SIGCONT)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, number)


def _pin(pid: int, core: int) -> None:
    """Pin a process with all the threads that it has; later ones inherit."""
    for task in (PROC / str(pid) / "task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def _descendants(root_pid: int) -> set[int]:
    parents = {int(path.name): _parent(path) for path in PROC.iterdir() if path.name.isdigit()}
    found = {root_pid}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended meanwhile


def _title(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
