"""Loader: loads safetensors into a CausalLM, the whole model or one rank's shard, on the configured device."""

import copy
import hashlib
import importlib.util
import logging
import math
import time

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.causal_lm import CausalLM, Shard, num_weights
from engine.models.files import names_model
from engine.models.layers.experts import pack_experts
from engine.models.layers.mixed_layers import prepare_layers
from engine.models.layers.packed_formats import FORMATS
from engine.models.layers.quantization import check_groups, convert_torchao, on_meta
from engine.models.packed_weights import check_quantization, load_packed, loading_arguments
from engine.models.shards import load_shard
from engine.models.source import ModelSource
from engine.models.weights import TEXT_PART, FileNames, fill, has_names_of

logger = logging.getLogger(__name__)


@names_model
def load_model(source: ModelSource, shard: Shard | None = None) -> CausalLM:
    """Load a model or a rank's shard, with our attention and fused projections; raise ModelError if it is unserved."""
    started = time.monotonic()
    device = resolve_device(source.config.device)
    dtype = resolve_dtype(source.config.dtype, device)
    configuration = source.loaded_configuration
    check_quantization(source)
    has_torchao = source.config.quantization != "none" or source.saved_format == "torchao"
    module = skeleton_of(source, dtype)
    source.skeleton = None
    if shard is None or shard.world_size == 1:
        module = load_whole(source, module, dtype, device)
    else:
        module = load_shard(source, module, shard, device)
    module.eval().requires_grad_(False)
    num_parameters = num_weights(module)
    if has_torchao:
        convert_torchao(source.path, module)
    state_shapes, state_chunk = prepare_layers(module, configuration)
    info = source.info(
        num_parameters=num_parameters,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        digest=hashlib.sha256(f"{source.digest} {torch.__version__}".encode()).hexdigest(),
        state_chunk=state_chunk,
    )
    size = f"{num_parameters / 1e6:.1f} M parameters in {info.dtype}"
    message = "%s: %s on %s, loaded in %.1f s; its context has %d tokens"
    logger.info(message, source.path, size, device, time.monotonic() - started, info.max_model_len)
    return source.kind.model_class(
        module, configuration, info, device, dtype, shard, kv_dtype(source.config), None, state_shapes
    )


@names_model
def check_module(source: ModelSource) -> nn.Module:
    """Return the model on the meta device; raise ModelError if its files' headers show that it cannot be loaded."""
    check_quantization(source)
    return load_whole(source, skeleton_of(source, torch.float32), torch.float32, torch.device("meta"))


def skeleton_of(source: ModelSource, dtype: torch.dtype) -> nn.Module:
    """Return the model on the meta device, made once for all users; raise ModelError if layers cannot be rounded."""
    if source.skeleton is None:
        configuration, model_class = copy.deepcopy(source.loaded_configuration), source.kind.model_class
        like = {"attn_implementation": model_class.attention, "dtype": dtype}
        source.skeleton = on_meta(configuration, model_class.loaded_by, **like)
        if source.config.quantization == "int4":
            check_groups(source.path, source.skeleton)
    return source.skeleton


def kv_dtype(config: ModelConfig) -> torch.dtype | None:
    """Return the configured number format of the KV cache; None is the model's."""
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else None


def load_whole(source: ModelSource, module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Fill a module from the files as saved, or let transformers load weights that it renames or converts."""
    model_class, is_rounded, saved = source.kind.model_class, source.config.quantization != "none", source.saved_format
    if saved == "mxfp4":
        pack_experts(module)
    names = FileNames(module)
    is_as_saved = saved is None and has_names_of(source, module, names)
    if not is_rounded and saved in (None, "mxfp4", *FORMATS) and model_class.loaded_by is AutoModelForCausalLM:
        full = load_packed(source, module, names, dtype, device) if saved in FORMATS else set[str]()
        if full is not None and (saved is not None or is_as_saved):
            fill(source, module, device, names, full=full)
            return module
    if saved == "gguf" and num_weights(module) > (size := sum(map(math.prod, source.weight_shapes.values()))):
        raise ModelError(f"{source.path} has {size:,} weights, and its config.json describes {num_weights(module):,}")
    if device.type == "meta":
        return module
    configuration = copy.deepcopy(source.loaded_configuration)
    arguments = loading_arguments(source, configuration)
    logger.info("%s: transformers loads the weights, which it renames, converts or quantises", source.path)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if source.is_text_part:
        arguments["key_mapping"] = TEXT_PART
    if device.type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        arguments["device_map"] = {"": device}  # converts on the device; without, on the host
    return model_class.load_module(source.directory, configuration, dtype, **arguments).to(device)


def resolve_device(device: str) -> torch.device:
    """Return the configured device with its index; auto is CUDA if available. Raise ModelError if CUDA is missing."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is cuda, but no CUDA device is visible to this process")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the configured number format; auto is 16 bits on GPUs, and float32 on CPUs.

    On CPUs, 16-bit products round by the number of rows, so texts would depend on the batch.
    """
    if dtype != "auto":
        resolved = getattr(torch, dtype)
        assert isinstance(resolved, torch.dtype)
        return resolved
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.float32
