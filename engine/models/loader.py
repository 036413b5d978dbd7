"""Loader: loads safetensors into a CausalLM on a device, the whole model or one rank's shard."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils import logging as transformers_logging

from engine.config import ModelConfig, ModelInfo
from engine.errors import ModelError
from engine.execution.attention import ATTENTION_NAME
from engine.models.causal_lm import CausalLM, Shard
from engine.models.encoder_decoder import prepare
from engine.models.files import model_directory
from engine.models.fusion import fuse_projections
from engine.models.quantization import check_quantization, convert_torchao, loading_arguments, saved_format
from engine.models.registry import context_length, decoder_start_id, eos_token_ids, read_config
from engine.models.shards import load_shard


def load_model(
    config: ModelConfig, *, device: torch.device, dtype: torch.dtype, shard: Shard | None = None
) -> CausalLM:
    """Load a model, or one rank's shard of it, with our attention function and fused projections.

    Raises:
        ModelError: there is no such model, it has no safetensors, or its architecture or quantisation cannot be served.
    """
    model_config = read_config(config)
    check_quantization(config, model_config, shard.world_size if shard else 1)
    if shard is None or shard.world_size == 1:
        module = _load_whole(config, device, dtype)
    else:
        module = load_shard(config, model_config, shard, dtype, device)
    module.eval().requires_grad_(False)
    num_parameters = sum(p.numel() for p in module.parameters())
    if config.quantization != "none" or saved_format(model_config) == "torchao":
        convert_torchao(config.path, module)
    fuse_projections(module)
    if model_config.is_encoder_decoder:
        prepare(module)
    info = ModelInfo(
        name=config.path,
        vocab_size=model_config.get_text_config().vocab_size,
        max_model_len=context_length(model_config),
        eos_token_ids=eos_token_ids(config, model_config),
        num_parameters=num_parameters,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        decoder_start_id=decoder_start_id(config, model_config),
    )
    return CausalLM(module, model_config, info, device, dtype, shard)


def _load_whole(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    model_config = read_config(config)
    has_encoder = bool(model_config.is_encoder_decoder)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        module: nn.Module = (AutoModelForSeq2SeqLM if has_encoder else AutoModelForCausalLM).from_pretrained(
            model_directory(config),
            dtype=dtype,
            attn_implementation="sdpa" if has_encoder else ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            **loading_arguments(config, model_config),
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(f"cannot load {config.path}: {error}") from error
    return module.to(device)
