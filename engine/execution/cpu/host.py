"""The host: how many of its threads a pass uses, and how much of its memory is free.

In small passes, waking a second thread takes longer than it saves. It takes even longer where OpenMP's threads sleep
between products (OMP_WAIT_POLICY=PASSIVE, as in served workers, whose idle threads must leave their cores to others).
"""

import os
from pathlib import Path

import psutil  # type: ignore[import-untyped]

MULTIPLICATIONS_PER_THREAD = 20_000_000
MULTIPLICATIONS_PER_SLEEPING_THREAD = 150_000_000
_CGROUP = Path("/sys/fs/cgroup")


def num_threads(num_multiplications: int, max_threads: int) -> int:
    """Return how many threads a pass uses."""
    are_asleep = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    share = MULTIPLICATIONS_PER_SLEEPING_THREAD if are_asleep else MULTIPLICATIONS_PER_THREAD
    return max(1, min(max_threads, num_multiplications // share))


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the memory available within the container's limit (cgroup v2); inactive file caches count as free."""
    available: int = psutil.virtual_memory().available
    limit, usage = cgroup / "memory.max", cgroup / "memory.current"
    if not (limit.exists() and usage.exists()) or (text := limit.read_text().strip()) == "max":
        return available
    statistics = cgroup / "memory.stat"
    lines = statistics.read_text().splitlines() if statistics.exists() else []
    reclaimable = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return min(available, max(0, int(text) - int(usage.read_text()) + reclaimable))
