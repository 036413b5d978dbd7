"""The backend registry: chooses device, number format and backend for a configuration."""

import torch

from engine.config import EngineConfig, ModelConfig
from engine.errors import ModelError
from engine.execution.backend import Backend
from engine.execution.memory import Survey
from engine.execution.paced.device import is_paced, parse_device
from engine.models.causal_lm import Shard
from engine.models.footprint import footprint


def load_backend(config: ModelConfig, *, shard: Shard | None = None) -> Backend:
    """Load a model, or one rank's shard of it, on the configured device.

    Raises:
        ModelError: there is no such device, or the model cannot be served.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if device.type == "cpu":
        from engine.execution.cpu.backend import load_cpu

        backend = load_cpu(config, dtype, shard)
        if not is_paced(config.device):
            return backend
        from engine.execution.paced.backend import PacedBackend

        return PacedBackend(backend, parse_device(config.device))
    from engine.execution.cuda.backend import load_cuda

    return load_cuda(config, device, dtype, shard)


def resolve_device(device: str) -> torch.device:
    """Return the configured device with its index; auto is CUDA if available.

    Ray makes only a worker's GPUs visible to it, so the current device is the worker's. A paced device computes on the
    CPU.

    Raises:
        ModelError: the configuration requires CUDA, but no CUDA device is visible.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is cuda, but no CUDA device is visible to this process")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the configured number format; auto is the fastest on this device."""
    if dtype != "auto":
        resolved = getattr(torch, dtype)
        assert isinstance(resolved, torch.dtype)
        return resolved
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    from engine.execution.cpu.backend import fastest_dtype

    return fastest_dtype()


def survey(config: ModelConfig, engine: EngineConfig, *, world_size: int = 1) -> Survey:
    """Measure a worker's device and model for the memory plan.

    Raises:
        ModelError: there is no such device or model, or the free memory cannot be read.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if device.type == "cpu":
        from engine.execution.cpu.backend import bytes_per_weight, free_bytes

        name, num_free, weight_bytes = "cpu", free_bytes(), bytes_per_weight(dtype)
    else:
        name, weight_bytes = str(torch.cuda.get_device_properties(device).uuid), dtype.itemsize
        num_free, _ = torch.cuda.mem_get_info(device)
    model_footprint = footprint(config, engine, dtype=dtype, bytes_per_weight=weight_bytes, world_size=world_size)
    return Survey(name, num_free, model_footprint)
