"""Arguments: our settings in vLLM's words. This file imports vllm only where a target loads."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, ModelConfig, Quantization, unknown_argument
from engine.errors import ConfigError
from engine.heads.config import read_head_config
from engine.models.source import ModelSource

TESTED = "0.32"
"""The release of vLLM with which the tests ran; its internals change between releases."""
INVARIANT = "invariant"
"""The key of the `vllm` setting that makes vLLM round alike in every batch."""
ADAPTERS = "lora_modules"
"""The key of the `vllm` setting that names the directories of LoRA adapters."""
_QUANTIZATION = {"int8": "int8_per_channel_weight_only", "fp8": "fp8_per_channel"}
_OURS: Mapping[str, str] = {
    "model": "target_model",
    "revision": "target_model",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_prefix_caching": "enable_prefix_caching",
    "tensor_parallel_size": "tensor_parallel_size",
    "enforce_eager": "compile",
    "gpu_memory_utilization": "memory_fraction",
    "kv_cache_memory_bytes": "num_blocks",
    "num_gpu_blocks_override": "num_blocks",
    "speculative_config": "drafting",
    "enable_lora": f"vllm.{ADAPTERS}",
    "max_loras": f"vllm.{ADAPTERS}",
}
"""Arguments of vLLM that settings of ours decide."""
_FIXED: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "language_model_only": True,
    "async_scheduling": False,
    "disable_hybrid_kv_cache_manager": True,
    "disable_log_stats": True,
    "distributed_executor_backend": None,
    "data_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "trust_remote_code": False,
}
"""Arguments that no setting changes: text is ours, and so are the schedule and the ranks' processes."""


def environment(config: ModelConfig) -> dict[str, str]:
    """Return what a process's environment must hold before it imports vllm or torch."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_BATCH_INVARIANT": str(int(bool(config.vllm.get(INVARIANT)))),
    }
    return variables | ({"OMP_NUM_THREADS": str(config.num_threads)} if config.num_threads else {})


def set_environment(config: ModelConfig) -> None:
    """Set this process's environment for a target in it; where a worker's process starts, Ray has set it already."""
    os.environ.update(environment(config))


def check_version() -> str:
    """Return the installed release of vLLM; raise ConfigError if there is none, or another than the tests ran with."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.startswith(f"{TESTED}."):
            return version
        raise ConfigError(f"execution is vllm, which works with vLLM {TESTED}; {name} {version} is installed")
    raise ConfigError("execution is vllm, which is not installed; `pip install 'paceline[vllm]'` installs it")


def check_arguments(arguments: Mapping[str, Any], quantization: Quantization) -> None:
    """Raise ConfigError if the `vllm` setting names what our settings decide, or an adapter's directory wrongly."""
    if quantization != "none" and "quantization" in arguments:
        raise ConfigError(f"vllm has the key 'quantization', but target_quantization is {quantization!r}; set only one")
    adapters = arguments.get(ADAPTERS, {})
    if not isinstance(adapters, dict) or not all(map(_is_absolute, adapters.values())):
        problem = 'it must be as {"name": "/directory"}, with absolute paths on the nodes of the target'
        raise ConfigError(f"vllm: {ADAPTERS} is {adapters!r}; {problem}")
    for name in arguments:
        if name in _OURS:
            raise ConfigError(f"vllm has the key {name!r}; that is the setting {_OURS[name]}")
        if name in _FIXED:
            raise ConfigError(f"vllm has the key {name!r}, which is always {_FIXED[name]!r} here")


def engine_arguments(source: ModelSource, engine: EngineConfig, dtype: str, world_size: int) -> dict[str, Any]:
    """Return the keywords of vLLM's `EngineArgs` for a target; raise ConfigError for a wrong key or value of `vllm`."""
    config, k = source.config, engine.num_speculative_tokens
    adapters = config.vllm.get(ADAPTERS, {})
    for name, path in adapters.items():  # vLLM would look for a model of this name on the hub
        if not (Path(path) / "adapter_config.json").is_file():
            raise ConfigError(f"vllm: {ADAPTERS}: {name} is {path}, which has no adapter_config.json")
    assert engine.num_blocks is not None
    # vLLM refuses a context for which its cache has no room.
    length = min(engine.max_model_len or source.max_model_len, source.max_model_len)
    most_tokens = max(engine.max_num_batched_tokens, engine.max_num_seqs * (1 + k))
    further = _parsed({name: value for name, value in config.vllm.items() if name not in (INVARIANT, ADAPTERS)})
    if source.head is not None:  # vLLM would take compiled passes that return no taps
        taps = read_head_config(source.head, source).taps
        further["additional_config"] = {**further.get("additional_config", {}), "taps": taps}
    return {
        **_FIXED,
        # One slot stays empty: on CPUs, vLLM computes rows without an adapter with the last slot.
        **({"enable_lora": True, "max_loras": len(adapters) + 1} if adapters else {}),
        **further,
        "model": str(source.directory),
        "dtype": dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "quantization": _QUANTIZATION.get(config.quantization) or config.vllm.get("quantization"),
        "max_model_len": min(length, engine.num_blocks * engine.block_size),
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": most_tokens,
        "block_size": engine.block_size,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.01,  # the memory plan has seen to it that there is room
        "enforce_eager": config.compile == "off",
        "tensor_parallel_size": world_size,
        # The runner then takes rows of up to 1 + k tokens; its drafter, which this names, never runs.
        "speculative_config": {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 3} if k else None,
    }


def _parsed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as vLLM's own command line reads them."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise ConfigError(f"vllm is {json.dumps(arguments)}: {message}")

    parser = EngineArgs.add_cli_args(Parser(add_help=False))
    known = vars(parser.parse_args([]))
    words = []
    for name, value in arguments.items():
        if name not in known:
            raise ConfigError(f"vllm: {unknown_argument(name, known)}")
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    parsed = vars(parser.parse_args(words))
    return {name: parsed[name] for name in arguments}


def digest_of(config: ModelConfig) -> str:
    """Return a digest of vLLM's arguments and of the adapters' files."""
    digest = hashlib.sha256(json.dumps(config.vllm, sort_keys=True).encode())
    for path in config.vllm.get(ADAPTERS, {}).values():
        for file in sorted(Path(path).glob("adapter_*")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_absolute(path: object) -> bool:
    return isinstance(path, str) and Path(path).is_absolute()
