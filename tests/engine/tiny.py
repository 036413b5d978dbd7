"""Tiny random models of several families, as transformers directories, and loading them."""

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from engine.config import ModelConfig
from engine.execution.registry import make_backend
from engine.models.loader import load_model
from engine.models.registry import open_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
}

HEADS = {"head_dim": 16}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
LONGCAT = {
    "num_layers": 1,
    "head_dim": 8,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2,
    "moe_topk": 2,
}
"""In place of `num_hidden_layers`, it has `num_layers`, of two sublayers each."""

SHARED = {
    "head_dim": 16,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "pad_token_id": 0,
}
"""The last two of six layers read the keys and values of the third and the fourth."""
GEMMA4 = {
    **SHARED,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_double_wide_mlp": True,
}
LLAMA4 = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 7,
    "floor_scale": 4,
    "attn_scale": 0.5,
}
MISTRAL3 = {
    "text_config": {**SIZES, **HEADS, "num_hidden_layers": 4, "model_type": "mistral"},
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    },
}
"""A model for images and text, of which we serve the text."""

T5_SIZES = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def save(config, path, *, seed=0, factor=6.0):
    """Write a random model; weights as initialised would make every token alike, so they are multiplied.

    An encoder-decoder has small embeddings, without which it would repeat its token, and scores of the usual size.
    """
    factors = {"shared.weight": 0.05, "decoder.final_layer_norm.weight": 30.0} if config.is_encoder_decoder else {}
    torch.manual_seed(seed)
    model = architectures_of(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in factors or parameter.dim() > 1:
                parameter.mul_(factors.get(name, factor))
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.save_pretrained(path)
    return str(path)


def architectures_of(config):
    """The class of transformers that loads models of a configuration."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText


def source_of(path, **settings):
    """A model's files, to be loaded in float32 on the CPU unless said otherwise."""
    return open_model(ModelConfig(str(path), **{"dtype": "float32", "device": "cpu"} | settings))


def model_of(path, shard=None, **settings):
    return load_model(source_of(path, **settings), shard)


def backend_of(path, shard=None, **settings):
    source = source_of(path, **settings)
    return make_backend(load_model(source, shard), source)


def check_same(module, expected):
    """Compare every parameter and buffer, bit by bit."""
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    others = dict([*expected.named_parameters(), *expected.named_buffers()])
    assert tensors.keys() == others.keys()
    for name, tensor in others.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name
