"""Tiny random models of several families, as transformers directories."""

import torch
from transformers import AutoModelForCausalLM

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


def save(config, path, *, seed=0, factor=6.0):
    """Write a random model; weights as initialised would make every token alike, so they are multiplied."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.save_pretrained(path)
    return str(path)
