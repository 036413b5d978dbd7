"""`pretrain`: trains a tokenizer and a Llama-architecture model on plain-text files."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engine.training.checkpoint import Checkpointer, save_model, write_whole
from engine.training.corpus import Batches, Corpus, Piece, read_corpus, render, tokenize
from engine.training.loop import Options, Plan, Task, autocast, make_optimizers, train
from engine.training.small_model import Size, build_model, train_tokenizer

TRAINING_RECORD = "training.json"
LONG_FRACTION = 0.1
"""The share of the steps, at the end, whose rows have the full context length."""


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(Options):
    """The options of `pretrain`."""

    size: Size
    vocab_size: int = 4096
    batch_tokens: int = 6144


@torch.inference_mode()
def held_out_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pieces: list[Piece]) -> float:
    """Return the mean loss on held-out text in windows of 512 tokens, in nats per token."""
    tokens = tokenize((piece.text + "\n\n" for piece in pieces), tokenizer)
    length = min(512, len(tokens) - 1, model.config.max_position_embeddings)
    total = 0.0
    for first in range(0, len(tokens) - 1, length):
        rows = tokens[first : first + length + 1].to(model.device)
        logits = model(input_ids=rows[None, :-1], use_cache=False).logits[0]
        total += float(F.cross_entropy(logits.float(), rows[1:], reduction="sum"))
    return total / (len(tokens) - 1)


def pretrain(paths: list[Path], output: Path, options: PretrainOptions, plan: Plan, console: Console) -> None:
    """Train a tokenizer and a model, and write them to `output`."""
    corpus = read_corpus(paths)
    tokenizer = _tokenizer(corpus, output, options)
    tokens = tokenize(render(corpus.training, tokenizer), tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(options.size, tokenizer, options.seed).to(device)  # type: ignore[arg-type]
    console.log(
        f"{len(tokens):,} training tokens, vocabulary {len(tokenizer):,}, "
        f"{model.num_parameters() / 1e6:.2f} M parameters, {device.type}"
    )
    checkpointer = Checkpointer(output, asdict(options), model, make_optimizers(model))
    train(_task(model, tokens, options, plan), plan, checkpointer, console)
    loss = held_out_loss(model, tokenizer, corpus.held_out)
    save_model(output, model, tokenizer)
    record = {"held_out_loss": round(loss, 4), "steps": plan.steps, "options": asdict(options)}
    write_whole(output / TRAINING_RECORD, (json.dumps(record, indent=2) + "\n").encode())
    console.log(f"held-out loss {loss:.3f} nats/token; wrote {output}")


def _task(model: PreTrainedModel, tokens: torch.Tensor, options: PretrainOptions, plan: Plan) -> Task:
    # The model itself stays eager for measuring, where lengths vary.
    forward = torch.compile(model, dynamic=False) if options.compile else model
    context = min(options.size.context, len(tokens) - 1)
    length = min(options.length, context)
    short = Batches(tokens, length, max(1, options.batch_tokens // length), options.seed)
    long = Batches(tokens, context, max(1, options.batch_tokens // context), options.seed + 1)
    long_from = round(plan.steps * (1 - LONG_FRACTION))

    def loss(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(model.device)
        with autocast(model.device):
            logits = forward(input_ids=rows[:, :-1].contiguous(), use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    return Task(lambda step: short[step] if step < long_from else long[step - long_from], loss)


def _tokenizer(corpus: Corpus, output: Path, options: PretrainOptions) -> PreTrainedTokenizerBase:
    # A resumed run uses the tokenizer of its first start.
    if (output / "tokenizer.json").is_file():
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(output)
        return loaded
    texts = (piece.text for piece in corpus.training)
    tokenizer = train_tokenizer(texts, options.vocab_size, options.size.context)
    tokenizer.save_pretrained(output)
    return tokenizer
