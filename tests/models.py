"""Tiny random models with a tokenizer, as directories on disk."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tests.fakes import byte_tokenizer, sharpen


def save_llama(
    path: Path, *, seed: int, noise: float = 0.0, vocab_size: int = 64, positions: int = 512, **settings: Any
) -> Path:
    """Write a Llama whose tokens are words; with `noise`, one that nearly agrees with that of the same seed."""
    vocabulary = {f"t{i}": i for i in range(vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="t0")))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": positions} | heads | settings
    return _save(path, tokenizer, seed, noise, vocab_size=vocab_size, eos_token_id=1, **sizes)


def save_model(path: Path, *, seed: int, layers: int, hidden: int, max_position_embeddings: int = 1024) -> str:
    """Write a Llama whose tokens are bytes, with a chat template; return the folder as servers take it."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "max_position_embeddings": max_position_embeddings}
    return str(_save(path, tokenizer, seed, 0.0, vocab_size=256, eos_token_id=0, **sizes, **heads))


def _save(path: Path, tokenizer: PreTrainedTokenizerFast, seed: int, noise: float, **settings: Any) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(bos_token_id=None, intermediate_size=2 * settings["hidden_size"], **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    sharpen(model, noise)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
