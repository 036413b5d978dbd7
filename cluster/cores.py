"""Cores: how many of a node's Ray may use, and which one a group keeps to where there are only two."""

import fcntl
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, Self

import ray

logger = logging.getLogger(__name__)


def count_cores(node_id: str) -> int:
    """Return how many cores of a node Ray may use; of this machine, if Ray does not know the node."""
    nodes: list[dict[str, Any]] = ray.nodes()
    allotted = next((node["Resources"].get("CPU", 0) for node in nodes if node["NodeID"] == node_id), 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, allotted or cores)))


class CoreLease:
    """One of the two cores of this machine, for the one group here that keeps to it.

    Router, draft and target of a group that does not run ahead compute in turn. On two cores the scheduler wakes each
    wherever it likes, often behind an HTTP process; together on one core none of them ever waits for another.
    """

    def __init__(self, core: int, descriptor: int) -> None:
        self.core = core
        self._descriptor = descriptor

    @classmethod
    def take(cls) -> Self | None:
        """Take the core; None where there are not exactly two, or another group of this user has it already."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(cores) != 2:
            return None
        path = Path(tempfile.gettempdir()) / f"paceline-core-{os.getuid()}.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:  # another user's file, say
            logger.warning("The group keeps to no core: %s", error)
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the process's death gives it back
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(cores[-1], descriptor)

    def give_back(self) -> None:
        """Let another group have the core."""
        os.close(self._descriptor)
