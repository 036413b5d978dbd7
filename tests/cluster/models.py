"""Tiny random models with a tokenizer, as directories on disk."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tests.fakes import sharpen


def save_llama(path: Path, *, seed: int, noise: float = 0.0, vocab_size: int = 64) -> Path:
    """Write a Llama with sharp distributions; with `noise`, one that nearly agrees with that of the same seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    sharpen(model, noise)
    model.save_pretrained(path)
    vocabulary = {f"t{i}": i for i in range(vocab_size)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="t0"))).save_pretrained(path)
    return path
