"""Tiny random models for servers of tests."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tests.fakes import byte_tokenizer, sharpen


def save_model(path: Path, *, seed: int, layers: int, hidden: int, max_position_embeddings: int = 1024) -> str:
    """Write a Llama model and a byte tokenizer into a folder; return the folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    sharpen(model)
    model.save_pretrained(path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)
