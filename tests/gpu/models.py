"""Models of well-known shapes with random weights, made on the device that computes them."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.config import ModelInfo
from engine.models.causal_lm import CausalLM
from engine.models.layers.fusion import fuse_projections
from engine.models.layers.layer_attention import ATTENTION_NAME

SHAPES = {"8b": (4096, 14336, 32, 32, 8, 128), "1b": (2048, 8192, 16, 32, 8, 64), "tiny": (64, 128, 2, 4, 2, 16)}
"""Hidden and inner size, layers, heads, key/value heads, head size: Llama 3.1 8B, Llama 3.2 1B, one for dry runs."""
VOCAB_SIZE = 128_256
MAX_MODEL_LEN = 16_384


def llama_config(shape: str) -> LlamaConfig:
    hidden, inner, layers, heads, kv_heads, head_dim = SHAPES[shape]
    return LlamaConfig(
        vocab_size=1024 if shape == "tiny" else VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=shape == "1b",
        rope_theta=500_000.0,
        bos_token_id=None,
        eos_token_id=0,
    )


def random_module(shape: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Return a transformers model of a shape, as transformers initialises it."""
    torch.manual_seed(0)
    with device:
        module: torch.nn.Module = AutoModelForCausalLM.from_config(
            llama_config(shape), attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    return module


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """Return a model of a shape as `engine.models.loader` returns loaded ones."""
    module = random_module(shape, device, dtype)
    module.eval().requires_grad_(False)
    fuse_projections(module)
    config = llama_config(shape)
    num_parameters = sum(p.numel() for p in module.parameters())
    dtype_name = str(dtype).removeprefix("torch.")
    info = ModelInfo(shape, config.vocab_size, MAX_MODEL_LEN, [0], num_parameters, dtype_name, str(device))
    return CausalLM(module, config, info, device, dtype)
