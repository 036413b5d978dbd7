"""The backend registry: surveys of devices, and which backend serves where."""

from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.cpu.cpu_backend import CpuBackend
from engine.execution.registry import WRAPPER, make_backend, survey
from tests.engine.tiny import backend_of, source_of

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.graphs import graph_bytes

CPU = torch.device("cpu")
SECOND_GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(("dtype", "weight_size"), [("float32", 6), ("bfloat16", 2)])
def test_a_survey_of_a_cpu_counts_packed_copies_of_float32_weights(dtype, weight_size, target, monkeypatch):
    monkeypatch.setattr("engine.execution.cpu.host.free_bytes", lambda: 12345)
    found = survey(source_of(target.info.name, dtype=dtype), EngineConfig())
    assert (found.device, found.free_bytes) == ("cpu", 12345)
    assert found.footprint.weight_bytes == weight_size * target.info.num_parameters
    assert found.footprint.kv_token_bytes == 2 * 2 * 2 * 8 * getattr(torch, dtype).itemsize


def test_drafts_that_one_worker_loads_are_surveyed_together(target):
    path = target.info.name
    one, both = (survey(source_of(path, dtype="float32", others=others), EngineConfig()) for others in ((), (path,)))
    assert both.footprint.name == f"{path} and {path}"
    for name in ("weight_bytes", "workspace_bytes", "kv_token_bytes", "state_bytes"):
        assert getattr(both.footprint, name) == 2 * getattr(one.footprint, name)
    assert both.footprint.max_model_len == one.footprint.max_model_len


def test_a_survey_of_a_gpu_names_the_card_by_what_all_processes_call_it(target, cuda, monkeypatch):
    """Two workers that each see their card as cuda:0 must not plan for one card."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-of-{device}"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 + device.index, 80))
    found = survey(source_of(target.info.name, dtype="bfloat16", device="auto"), EngineConfig())
    assert (found.device, found.free_bytes) == ("GPU-of-cuda:1", 71)
    assert found.footprint.weight_bytes == 2 * target.info.num_parameters
    compiled = survey(source_of(target.info.name, dtype="bfloat16", device="auto", compile="auto"), EngineConfig())
    configuration = source_of(target.info.name).configuration
    added = graph_bytes(EngineConfig(), configuration, 512)
    assert compiled.footprint.workspace_bytes == found.footprint.workspace_bytes + added


def test_every_device_has_a_backend_of_its_own(target_path, monkeypatch):
    backend = backend_of(target_path)
    assert isinstance(backend, CpuBackend)
    assert backend.device == CPU
    made = "engine.execution.cuda.cuda_backend.make_cuda_backend"
    monkeypatch.setattr(made, lambda *arguments, **options: (*arguments, options))
    model, source, engine = SimpleNamespace(device=SECOND_GPU), source_of("a model"), EngineConfig(max_num_seqs=3)
    options = {"invariant": False, "branches": (4, 8)}
    assert make_backend(model, source, engine, **options) == (model, source.config, engine, options)


def wrap(backend):
    return ("wrapped", backend.device)


def test_every_backend_goes_through_the_function_that_the_environment_names(target_path, monkeypatch):
    monkeypatch.setenv(WRAPPER, f"{__name__}:wrap")
    assert backend_of(target_path) == ("wrapped", CPU)


@pytest.mark.parametrize("name", ["wrap", "no.such.module:wrap", f"{__name__}:nothing"])
def test_a_function_that_does_not_exist_is_named(name, target_path, monkeypatch):
    monkeypatch.setenv(WRAPPER, name)
    with pytest.raises(ConfigError, match=f"PACELINE_BACKEND is '{name}', which cannot be imported"):
        backend_of(target_path)
