"""Free memory: of the machine, and within the limit of the container."""

from pathlib import Path

from engine.errors import ModelError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the free bytes: the kernel's MemAvailable, at most what the container's limit (cgroup v2) leaves.

    Raises:
        ModelError: the system does not report MemAvailable.
    """
    available = _available(meminfo)
    left = _left_in_container(cgroup)
    return available if left is None else min(available, left)


def _available(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ModelError("cannot read the free memory of this machine; set num_blocks")


def _left_in_container(cgroup: Path) -> int | None:
    """Return the bytes left below the container's limit, or None without one; inactive file caches count as free."""
    limit, usage, statistics = cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat"
    if not (limit.exists() and usage.exists()) or (text := limit.read_text().strip()) == "max":
        return None
    reclaimable = 0
    if statistics.exists():
        figures = dict(line.split() for line in statistics.read_text().splitlines())
        reclaimable = int(figures.get("inactive_file", 0))
    return max(0, int(text) - int(usage.read_text()) + reclaimable)
