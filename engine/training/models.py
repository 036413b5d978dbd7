"""Builds and loads the Llama-architecture models that the tool trains."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine.training.errors import TrainingError


@dataclass(frozen=True)
class Size:
    """The sizes of a model's layers and its context length."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    context: int = 2048
    head_dim: int = 32

    @classmethod
    def parse(cls, text: str, context: int = 2048) -> "Size":
        """Parse `LAYERSxHIDDEN`, such as `2x128`, and derive the other sizes by the usual ratios."""
        try:
            layers, hidden = (int(number) for number in text.split("x"))
        except ValueError:
            layers = hidden = 0
        if layers < 1 or hidden < 32 or hidden % 32:
            raise TrainingError(f"size {text!r} is not LAYERSxHIDDEN with HIDDEN a multiple of 32")
        heads = hidden // cls.head_dim
        kv_heads = next(n for n in (2, 1) if heads % n == 0)
        intermediate = 64 * round(hidden * 8 / 3 / 64)
        return cls(layers, hidden, intermediate, heads, kv_heads, context)


def build_model(size: Size, tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """Initialise a model with tied embeddings, whose layers are the identity at first."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(seed)
        model = LlamaForCausalLM(config)
    for name, param in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(param)
    return model


def load_model(folder: Path, device: torch.device | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a transformers directory in float32, with its tokenizer."""
    if not (folder / "config.json").is_file():
        raise TrainingError(f"{folder} is not a model directory: it has no config.json")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TrainingError(f"cannot load {folder}: {error}") from error
    nn.Module.to(model, device or torch.device("cpu"))
    return model, tokenizer


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; tied ones count once."""
    return sum(param.numel() for param in model.parameters())
