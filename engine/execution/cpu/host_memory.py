"""The memory that this process may still take: of the machine, and of the container it runs in."""

from pathlib import Path

from engine.errors import ModelError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the bytes that are free: what the kernel calls available, within the container's limit (cgroup v2).

    Raises:
        ModelError: this system does not tell.
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
    """Return the bytes left below the container's limit; None without a limit. Caches of files can be dropped."""
    limit, usage, statistics = cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat"
    if not (limit.exists() and usage.exists()) or (text := limit.read_text().strip()) == "max":
        return None
    droppable = 0
    if statistics.exists():
        figures = dict(line.split() for line in statistics.read_text().splitlines())
        droppable = int(figures.get("inactive_file", 0))
    return max(0, int(text) - int(usage.read_text()) + droppable)
