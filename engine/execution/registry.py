"""The backend registry: makes the backend of a device, and surveys the device's memory."""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.config import EngineConfig, import_named
from engine.execution.backend import Backend
from engine.execution.footprint import footprint, footprint_with_vllm
from engine.execution.memory import Survey, together
from engine.models.causal_lm import CausalLM
from engine.models.files import names_model
from engine.models.loader import resolve_device, resolve_dtype
from engine.models.source import ModelSource

WRAPPER = "PACELINE_BACKEND"
"""Environment variable `module:function`. The function gets every loaded backend and returns its replacement, so that
benches can simulate hardware in all processes that load a model."""


def make_backend(
    model: CausalLM,
    source: ModelSource,
    engine: EngineConfig | None = None,
    *,
    invariant: bool = True,
    branches: Sequence[int] = (),
) -> Backend:
    """Return the backend of a loaded model's device; see `CudaBackend`, and `graphs.shapes` for `branches`.

    Raises:
        ConfigError: the environment names no function.
        ModelError: a trial pass fails, because the model cannot be served or does not fit into memory.
    """
    if model.device.type == "cpu":
        from engine.execution.cpu.cpu_backend import CpuBackend

        backend: Backend = CpuBackend(model, source)
    else:
        from engine.execution.cuda.cuda_backend import make_cuda_backend

        backend = make_cuda_backend(
            model, source.config, engine or EngineConfig(), invariant=invariant, branches=branches
        )
    if name := os.environ.get(WRAPPER):
        wrapped: Backend = import_named(WRAPPER, name)(backend)
        return wrapped
    return backend


@names_model
def survey(source: ModelSource, engine: EngineConfig, *, world_size: int = 1) -> Survey:
    """Measure a worker's device and model for the memory plan, a draft with the others beside it.

    Raises ModelError if they cannot be measured.
    """
    if len(source.drafts) > 1:
        surveys = [survey(draft, engine) for draft in source.drafts]
        return replace(surveys[0], footprint=together([each.footprint for each in surveys]))
    device = resolve_device(source.config.device)
    dtype = resolve_dtype(source.config.dtype, device)
    if device.type == "cpu":
        from engine.execution.cpu.cpu_backend import bytes_per_weight
        from engine.execution.cpu.host import free_bytes

        name, num_free, weight_bytes = "cpu", free_bytes(), bytes_per_weight(dtype)
    else:
        name, weight_bytes = str(torch.cuda.get_device_properties(device).uuid), dtype.itemsize
        num_free, _ = torch.cuda.mem_get_info(device)
    if source.config.execution == "vllm":
        return Survey(name, num_free, footprint_with_vllm(source, engine, dtype=dtype, world_size=world_size))
    needs = footprint(source, engine, dtype=dtype, bytes_per_weight=weight_bytes, world_size=world_size)
    is_compiled = source.config.compile != "off" and source.kind.model_class.why_eager(source.configuration) is None
    if device.type != "cpu" and is_compiled and world_size == 1:
        from engine.execution.cuda.graphs import graph_bytes

        num_models = len(source.parts)
        num_bytes = graph_bytes(engine, source.configuration, needs.max_model_len, num_models=num_models)
        needs = replace(needs, workspace_bytes=needs.workspace_bytes + num_bytes)
    return Survey(name, num_free, needs)
