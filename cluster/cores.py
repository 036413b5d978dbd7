"""Cores: how many of a node's Ray may use, and which one a pinned group keeps to."""

import os
from typing import Any

import ray


def count_cores(node_id: str) -> int:
    """Return how many cores of a node Ray may use; of this machine, if Ray does not know the node."""
    nodes: list[dict[str, Any]] = ray.nodes()
    allotted = next((node["Resources"].get("CPU", 0) for node in nodes if node["NodeID"] == node_id), 0)
    cores = len(_own_cores()) or os.cpu_count() or 1
    return max(1, int(min(cores, allotted or cores)))


def home_core() -> int | None:
    """Return the core of this node that a pinned group keeps to; None where there is no choice.

    Router, draft and target of a group that does not run ahead compute in turn, most of the time. Of few cores the
    scheduler wakes each on whichever it likes, often behind an HTTP process; on one core they wait for nobody else.
    """
    cores = _own_cores()
    return max(cores) if len(cores) > 1 else None


def _own_cores() -> set[int]:
    """Return the cores that this thread may use; none where the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
