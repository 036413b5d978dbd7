"""The host: how many of its threads a pass uses, and how much of its memory is free.

The rule is one thread per 20 million multiplications of a pass, at most the worker's cores. In smaller passes, waking a
second thread takes longer than it saves. Where OpenMP's threads sleep between products (OMP_WAIT_POLICY=PASSIVE, as in
served workers, so that idle ones leave their cores to others), waking takes longer, and it is one per 150 million.
"""

import os
from pathlib import Path

from engine.errors import ModelError

MULTIPLICATIONS_PER_THREAD = 20_000_000
MULTIPLICATIONS_PER_SLEEPING_THREAD = 150_000_000
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def num_threads(num_multiplications: int, max_threads: int) -> int:
    """Return how many threads a pass uses."""
    are_asleep = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    share = MULTIPLICATIONS_PER_SLEEPING_THREAD if are_asleep else MULTIPLICATIONS_PER_THREAD
    return max(1, min(max_threads, num_multiplications // share))


def free_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the kernel's MemAvailable, within the container's limit (cgroup v2); raise ModelError if there is none.

    Inactive file caches of a container count as free.
    """
    available = _figures(meminfo).get("MemAvailable:")
    if available is None:
        raise ModelError("cannot read the free memory of this machine; set num_blocks")
    limit, usage = cgroup / "memory.max", cgroup / "memory.current"
    if not (limit.exists() and usage.exists()) or (text := limit.read_text().strip()) == "max":
        return available * 1024
    reclaimable = _figures(cgroup / "memory.stat").get("inactive_file", 0)
    return min(available * 1024, max(0, int(text) - int(usage.read_text()) + reclaimable))


def _figures(path: Path) -> dict[str, int]:
    """Return the numbers in a file with a name and a number in each line; nothing if there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: int(number) for name, number, *_ in map(str.split, lines)}
