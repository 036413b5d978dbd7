"""The host: threads for the work of a pass, and memory within the container's limit."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from engine.execution.batch import ForwardRow, build
from engine.execution.cpu import host
from engine.execution.cpu.host import free_bytes, num_threads
from tests.engine.tiny import backend_of

MIB = 2**20
AVAILABLE = 4096 * MIB


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"max": 1000 * MIB, "current": 300 * MIB}, 700 * MIB, id="a limit below what is available"),
        pytest.param({"max": 9000 * MIB, "current": 300 * MIB}, AVAILABLE, id="a limit above it"),
        pytest.param({"max": "max", "current": 300 * MIB}, AVAILABLE, id="no limit"),
        pytest.param({"max": 1000 * MIB, "current": 1200 * MIB}, 0, id="beyond its limit"),
        pytest.param(
            {"max": 1000 * MIB, "current": 900 * MIB, "stat": f"anon 5\ninactive_file {250 * MIB}\nfile 7"},
            350 * MIB,
            id="cached files that can be dropped",
        ),
    ],
)
def test_a_containers_limit_counts(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=AVAILABLE))
    for name, content in files.items():
        (tmp_path / f"memory.{name}").write_text(f"{content}\n")
    assert free_bytes(tmp_path) == expected


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
