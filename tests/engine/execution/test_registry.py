"""The backend registry: devices with their index, number formats, surveys, and which backend serves where."""

from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.errors import ModelError
from engine.execution.cpu.backend import CpuBackend
from engine.execution.registry import load_backend, resolve_device, resolve_dtype, survey

CPU = torch.device("cpu")
SECOND_GPU = torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch):
    """A process whose current device is the second of its GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_gpu_is_the_processs_current_one_with_its_index(device, cuda):
    """NCCL needs the index: "cuda" alone is not equal to "cuda:1"."""
    assert resolve_device(device) == SECOND_GPU


def test_the_cpu_is_taken_where_it_is_configured_in_spite_of_a_gpu(cuda):
    assert resolve_device("cpu") == CPU


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(no_cuda):
    assert resolve_device("auto") == CPU
    with pytest.raises(ModelError, match="no CUDA device"):
        resolve_device("cuda")


@pytest.mark.parametrize("device", [CPU, SECOND_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_configured_dtype_is_taken(dtype, device, cuda):
    assert resolve_dtype(str(dtype).removeprefix("torch."), device) is dtype


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_serves_in_bfloat16_unless_it_is_too_old_for_it(has_bf16, dtype, cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
    assert resolve_dtype("auto", SECOND_GPU) is dtype


@pytest.mark.parametrize(("has_amx", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_serves_in_bfloat16_where_it_multiplies_that_faster(has_amx, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert resolve_dtype("auto", CPU) is dtype


@pytest.mark.parametrize(("dtype", "weight_size"), [("float32", 6), ("bfloat16", 2)])
def test_a_survey_of_a_cpu_counts_packed_copies_of_float32_weights(dtype, weight_size, target, monkeypatch):
    monkeypatch.setattr("engine.execution.cpu.backend.free_bytes", lambda: 12345)
    found = survey(ModelConfig(target.info.name, dtype=dtype, device="cpu"), EngineConfig())
    assert (found.device, found.free_bytes) == ("cpu", 12345)
    assert found.footprint.weight_bytes == weight_size * target.info.num_parameters
    assert found.footprint.kv_token_bytes == 2 * 2 * 2 * 8 * getattr(torch, dtype).itemsize


def test_a_survey_of_a_gpu_names_the_card_by_what_all_processes_call_it(target, cuda, monkeypatch):
    """Two workers that each see their card as cuda:0 must not plan for one card."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-of-{device}"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 + device.index, 80))
    found = survey(ModelConfig(target.info.name, dtype="bfloat16", device="auto"), EngineConfig())
    assert (found.device, found.free_bytes) == ("GPU-of-cuda:1", 71)
    assert found.footprint.weight_bytes == 2 * target.info.num_parameters


def test_a_rank_surveys_its_own_slices(target):
    config = ModelConfig(target.info.name, dtype="float32", device="cpu")
    whole, half = (survey(config, EngineConfig(), world_size=size).footprint for size in (1, 2))
    assert half.kv_token_bytes * 2 == whole.kv_token_bytes
    assert half.weight_bytes < whole.weight_bytes


def test_the_cpu_has_a_backend_of_its_own(target_path):
    backend = load_backend(ModelConfig(target_path, dtype="float32", device="cpu"))
    assert isinstance(backend, CpuBackend)
    assert backend.device == CPU


def test_a_gpu_runs_eagerly(cuda, monkeypatch):
    calls = []
    monkeypatch.setattr("engine.execution.cuda.backend.load_cuda", lambda *arguments: calls.append(arguments))
    config = ModelConfig("a model", device="cuda")
    load_backend(config)
    assert calls == [(config, SECOND_GPU, torch.bfloat16, None)]
