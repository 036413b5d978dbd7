"""Rank: vLLM's worker of one rank of the target, in this process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from engine.errors import ModelError
from engine.execution.vllm.runner import Runner, tap


class RankExecutor(UniProcExecutor):  # type: ignore[misc]
    """One worker in this process, a rank of a torch.distributed world that the caller has joined."""

    place: tuple[str, int, int] | None = None
    """The world's address, this rank, and its device's index; None for a single rank."""

    def _distributed_args(self) -> tuple[str, int, int]:
        return self.place or super()._distributed_args()


def start(
    arguments: Mapping[str, Any],
    device_type: str,
    num_blocks: int,
    adapters: Sequence[LoRARequest] = (),
    place: tuple[str, int, int] | None = None,
    taps: Sequence[int] = (),
) -> Runner:
    """Load a rank and its KV cache, as vLLM's `EngineCore._initialize_kv_caches` does, and return its runner.

    Args:
        arguments: of vLLM's `EngineArgs`.
        device_type: where this project's settings place the target; vLLM has one kind of device, that of its build.
        num_blocks: KV blocks, including block 0, which vLLM gives to no request, either.
        place: see `RankExecutor`.
        taps: layers whose outputs are read; see `tap`.

    Raises:
        ModelError: vLLM does not serve the model so.
    """
    if (built_for := current_platform.device_type) != device_type:
        raise ModelError(f"device is {device_type}, but the vLLM that is installed is built for {built_for}")
    model, set_num_threads = arguments["model"], torch.set_num_threads
    RankExecutor.place = place
    try:
        return _start(model, {**arguments, "distributed_executor_backend": RankExecutor}, num_blocks, adapters, taps)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{model} does not fit into memory: {error}") from error
    except (ValueError, NotImplementedError) as error:
        raise ModelError(f"vLLM does not serve {model}: {_first_line(error)}") from error
    finally:
        torch.set_num_threads = set_num_threads  # on CPUs, vLLM replaces it by a function that does nothing


def _start(
    model: str, arguments: Mapping[str, Any], num_blocks: int, adapters: Sequence[LoRARequest], taps: Sequence[int]
) -> Runner:
    config = EngineArgs(**arguments, kv_cache_memory_bytes=1).create_engine_config()
    executor = RankExecutor(config)
    runner = executor.driver_worker.worker.model_runner
    if taps:
        tap(runner, taps)
    register_all_kvcache_specs(config)
    specs = executor.get_kv_cache_specs()
    layouts = executor.get_supported_kv_cache_layouts()
    layout = resolve_kv_cache_layout(config, layouts, [spec for worker in specs for spec in worker.values()])
    executor.set_kv_cache_layout(layout.name)
    config.cache_config.kv_cache_memory_bytes = num_blocks * sum(spec.page_size_bytes for spec in specs[0].values())
    [cache] = get_kv_cache_configs(config, specs, executor.determine_available_memory())
    cache.kv_cache_layout = config.cache_config.kv_cache_layout
    if len(cache.kv_cache_groups) != 1:
        problem = f"vLLM keeps {len(cache.kv_cache_groups)} kinds of KV blocks for it"
        raise ModelError(f"{model}: {problem}, and execution=vllm serves one; set execution to torch")
    if (size := cache.kv_cache_groups[0].kv_cache_spec.block_size) != arguments["block_size"]:
        problem = f"its attention needs KV blocks of {size} tokens"
        raise ModelError(f'{model}: {problem}; set vllm to {{"block_size": {size}}}')
    assert cache.num_blocks >= num_blocks
    config.cache_config.num_gpu_blocks = cache.num_blocks
    executor.initialize_from_config([cache])
    executor.compile_or_warm_up_model()
    for adapter in adapters:  # now, because a broken adapter would end a round
        executor.add_lora(adapter)
    if executor.place is not None:
        _forget_names(executor.place[0], executor.place[1])
    return Runner(runner)


def _forget_names(address: str, rank: int) -> None:
    """Unlink this rank's shared memory: all ranks have mapped it by now, and a killed rank would leave it behind."""
    identifier = address.rpartition(":")[2]  # as in vLLM's CPUWorker and CpuCommunicator
    for path in Path("/dev/shm").glob(f"{identifier}-*-cpushm_{rank}"):
        path.unlink()
    queue = get_tp_group().mq_broadcaster
    if rank == 0 and queue is not None:
        queue.buffer.shared_memory.unlink()


def _first_line(error: Exception) -> str:
    """Return the message of pydantic's error without its headline and its advice, or the first line of another's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        lines[1].partition(" [type=")[0].removeprefix("Value error, ")
        if len(lines) > 1 and "validation error" in lines[0]
        else lines[0]
    )
