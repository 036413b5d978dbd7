"""Builds and loads the Llama models of `pretrain` and `distill`, and trains their tokenizer."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from engine.training.checkpoint import TrainingError

END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"

# A system message becomes prose before the conversation, because the corpus has no system messages. It has no tools
# either: they are here in the form of Hermes, so that clients which call tools can be tried.
CHAT_TEMPLATE = (
    "{% if tools %}These functions can be called:\n"
    "{% for tool in tools %}{{ tool['function'] | tojson }}\n{% endfor %}"
    "A call is written as\n"
    '<tool_call>\n{"name": "the function", "arguments": {"its": "arguments"}}\n</tool_call>\n\n{% endif %}'
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "<tool_call>\n{\"name\": \"{{ call['function']['name'] }}\", "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}\n</tool_call>"
    "{% endfor %}<|endoftext|>"
    "{% elif message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'tool' %}<|user|><tool_response>\n{{ message['content'] }}\n</tool_response>"
    "{% else %}{{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


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
        return cls(layers, hidden, 64 * round(hidden * 8 / 3 / 64), heads, 1 if heads % 2 else 2, context)


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


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on texts; every byte is a token, so it can encode any input."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [END_OF_TEXT, USER, ASSISTANT]
    if vocab_size < len(alphabet) + len(special):
        raise TrainingError(f"the vocabulary has {vocab_size} tokens; it needs at least {len(alphabet) + len(special)}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
