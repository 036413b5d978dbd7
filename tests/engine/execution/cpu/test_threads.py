"""Threads: as many as the work of a pass is worth, within the worker's cores."""

import pytest
import torch

from engine.config import ModelConfig
from engine.execution.batch import ForwardRow, build
from engine.execution.cpu import threads
from engine.execution.cpu.threads import num_threads
from engine.execution.registry import load_backend
from tests.cluster.models import save_llama


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("num_weights", "num_tokens", "max_threads", "spinning", "sleeping"),
    [
        pytest.param(5_500_000, 5, 8, 1, 1, id="a small model decodes"),
        pytest.param(5_500_000, 8, 8, 2, 1, id="a small model decodes a batch"),
        pytest.param(5_500_000, 100, 32, 27, 3, id="a small model reads a prompt"),
        pytest.param(380_000_000, 1, 32, 19, 2, id="a large model decodes"),
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


def test_passes_of_one_model_run_with_the_threads_of_their_size(tmp_path, monkeypatch):
    path = str(save_llama(tmp_path, seed=1))
    model = load_backend(ModelConfig(path, compile="off", device="cpu", num_threads=3))
    monkeypatch.setattr(threads, "MULTIPLICATIONS_PER_THREAD", 5 * model.info.num_parameters)
    kv = model.allocate_kv(4, 16)
    for length, count in [(3, 1), (10, 2), (20, 3), (5, 1)]:
        model.run(build([ForwardRow([1] * length, 0, [1, 2], 1)], kv))
        assert torch.get_num_threads() == count
