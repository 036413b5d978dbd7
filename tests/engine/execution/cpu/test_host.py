"""The host: threads for the work of a pass, and memory within the container's limit."""

import pytest
import torch

from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.execution.cpu import host
from engine.execution.cpu.host import free_bytes, num_threads
from tests.engine.tiny import backend_of

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


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"limit": 1000 * MIB, "usage": 300 * MIB}, 700 * MIB, id="a limit below what is available"),
        pytest.param({"limit": 9000 * MIB, "usage": 300 * MIB}, AVAILABLE, id="a limit above it"),
        pytest.param({"limit": "max", "usage": 300 * MIB}, AVAILABLE, id="no limit"),
        pytest.param({"limit": 1000 * MIB, "usage": 1200 * MIB}, 0, id="beyond its limit"),
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


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("num_weights", "num_tokens", "max_threads", "spinning", "sleeping"),
    [
        pytest.param(5_500_000, 8, 8, 2, 1, id="a small model decodes a batch"),
        pytest.param(5_500_000, 100, 32, 27, 3, id="a small model reads a prompt"),
        pytest.param(380_000_000, 8, 2, 2, 2, id="more than there are cores"),
        pytest.param(8_000_000_000, 1, 1, 1, 1, id="one core"),
    ],
)
def test_a_pass_gets_a_thread_for_its_work_and_for_more_work_where_threads_sleep(
    num_weights, num_tokens, max_threads, spinning, sleeping, monkeypatch
):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert num_threads(num_weights * num_tokens, max_threads) == spinning
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert num_threads(num_weights * num_tokens, max_threads) == sleeping


def test_passes_of_one_model_run_with_the_threads_of_their_size(target_path, monkeypatch):
    model = backend_of(target_path, num_threads=3)
    monkeypatch.setattr(host, "MULTIPLICATIONS_PER_THREAD", 5 * model.info.num_parameters)
    kv = model.allocate_kv(4, 16)
    for length, count in [(3, 1), (10, 2), (20, 3), (5, 1)]:
        model.run(build([ForwardRow([1] * length, 0, [1, 2], 1)], kv))
        assert torch.get_num_threads() == count
