"""The processes of a served application: freezing them, and the CPU time that each takes.

An application without requests still takes a sixth of a core: Ray's and Serve's processes look after each other. Where
several are measured in turn, those whose turn it is not are frozen.
"""

from contextlib import suppress

import psutil

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
    """Stop a process and all its descendants, including those that start meanwhile."""
    stopped: set[psutil.Process] = set()
    while new := set(_tree(root_pid)) - stopped:
        for process in new:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        stopped |= new


def thaw(root_pid: int) -> None:
    """Let a frozen process and its descendants continue."""
    for process in _tree(root_pid):
        with suppress(psutil.NoSuchProcess):
            process.resume()


def cpu_seconds(root_pid: int) -> dict[str, float]:
    """Return the CPU time, user and system, that a process and its descendants have taken, by `NAMES`."""
    seconds = dict.fromkeys(NAMES, 0.0)
    for process in _tree(root_pid):
        with suppress(psutil.NoSuchProcess):
            title, times = " ".join(process.cmdline()), process.cpu_times()
            seconds[next((TITLES[word] for word in TITLES if word in title), "Ray")] += times.user + times.system
    return seconds


def _tree(root_pid: int) -> list[psutil.Process]:
    root = psutil.Process(root_pid)
    return [root, *root.children(recursive=True)]
