"""Free memory: what the kernel calls available, within the container's limit."""

import pytest

from engine.errors import ModelError
from engine.execution.cpu.host_memory import free_bytes

MIB = 2**20
MEMINFO = "MemTotal:       8388608 kB\nMemFree:         100000 kB\nMemAvailable:    4194304 kB\nCached: 5 kB\n"
AVAILABLE = 4096 * MIB


def write(path, *, limit=None, usage=None, statistics=None):
    """Write a cgroup's files, those that are not None."""
    path.mkdir()
    for name, value in (("memory.max", limit), ("memory.current", usage), ("memory.stat", statistics)):
        if value is not None:
            (path / name).write_text(f"{value}\n")
    return path


@pytest.fixture
def meminfo(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text(MEMINFO)
    return path


def test_without_a_container_all_that_is_available_is_free(meminfo, tmp_path):
    assert free_bytes(meminfo, tmp_path / "absent") == AVAILABLE


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"limit": 1000 * MIB, "usage": 300 * MIB}, 700 * MIB, id="a limit below what is available"),
        pytest.param({"limit": 9000 * MIB, "usage": 300 * MIB}, AVAILABLE, id="a limit above it"),
        pytest.param({"limit": "max", "usage": 300 * MIB}, AVAILABLE, id="no limit"),
        pytest.param({"limit": 1000 * MIB, "usage": 1200 * MIB}, 0, id="beyond its limit"),
        pytest.param({"limit": 1000 * MIB}, AVAILABLE, id="no file of its usage"),
        pytest.param({"usage": 300 * MIB}, AVAILABLE, id="no file of its limit"),
        pytest.param(
            {"limit": 1000 * MIB, "usage": 900 * MIB, "statistics": f"anon 5\ninactive_file {250 * MIB}\nfile 7"},
            350 * MIB,
            id="cached files that can be dropped",
        ),
        pytest.param(
            {"limit": 1000 * MIB, "usage": 900 * MIB, "statistics": f"anon {250 * MIB}"}, 100 * MIB, id="none of them"
        ),
    ],
)
def test_a_containers_limit_counts(files, expected, meminfo, tmp_path):
    assert free_bytes(meminfo, write(tmp_path / "cgroup", **files)) == expected


@pytest.mark.parametrize("content", [None, "MemTotal: 8388608 kB\n"])
def test_a_system_that_does_not_tell_is_refused_with_a_way_out(content, tmp_path):
    path = tmp_path / "meminfo"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelError, match="set num_blocks"):
        free_bytes(path, tmp_path / "absent")
