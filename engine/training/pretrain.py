"""`pretrain`: trains a tokenizer and a Llama-architecture model on plain-text files."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engine.training.checkpoint import Checkpointer, save_model, write_whole
from engine.training.corpus import Batches, Corpus, Piece, read_corpus, render, tokenize
from engine.training.loop import Plan, autocast, train
from engine.training.models import Size, build_model, count_parameters
from engine.training.optimizer import make_optimizers
from engine.training.tokenizer import train_tokenizer

TRAINING_RECORD = "training.json"


@dataclass(frozen=True)
class PretrainOptions:
    """The options that determine the result of `pretrain`, besides the corpus."""

    size: Size
    vocab_size: int = 4096
    batch_tokens: int = 6144
    length: int = 256
    long_fraction: float = 0.1
    seed: int = 0
    compile: bool = False


@dataclass(frozen=True)
class LanguageModelling:
    """Next-token prediction on short rows first, and on rows of full context length at the end."""

    short: Batches
    long: Batches
    long_from: int
    loss: Callable[[torch.Tensor], torch.Tensor]

    def batch(self, step: int) -> torch.Tensor:
        """Return the rows of a step: [rows, length + 1]."""
        return self.short[step] if step < self.long_from else self.long[step - self.long_from]


@torch.inference_mode()
def held_out_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pieces: list[Piece]) -> float:
    """Return the mean loss on held-out text in windows of 512 tokens, in nats per token."""
    tokens = tokenize((piece.text + "\n\n" for piece in pieces), tokenizer)
    length = min(512, len(tokens) - 1, model.config.max_position_embeddings)
    windows = [tokens[i : i + length + 1] for i in range(0, len(tokens) - 1, length)]
    total = 0.0
    for window in windows:
        rows = window.to(model.device)
        logits = model(input_ids=rows[None, :-1], use_cache=False).logits[0]
        total += float(F.cross_entropy(logits.float(), rows[1:], reduction="sum"))
    return total / (len(tokens) - 1)


def pretrain(paths: list[Path], output: Path, options: PretrainOptions, plan: Plan, console: Console) -> bool:
    """Train a tokenizer and a model and write them to `output`; return False if interrupted."""
    corpus = read_corpus(paths)
    tokenizer = _tokenizer(corpus, output, options)
    tokens = tokenize(render(corpus.training, tokenizer), tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(options.size, tokenizer, options.seed).to(device)  # type: ignore[arg-type]
    console.log(
        f"{len(tokens):,} training tokens, vocabulary {len(tokenizer):,}, "
        f"{count_parameters(model) / 1e6:.2f} M parameters, {device.type}"
    )
    checkpointer = Checkpointer(output, asdict(options), model, make_optimizers(model))
    if not train(_task(model, tokens, options, plan), plan, checkpointer, console):
        return False
    loss = held_out_loss(model, tokenizer, corpus.held_out)
    save_model(output, model, tokenizer)
    record = {"held_out_loss": round(loss, 4), "steps": plan.steps, "options": asdict(options)}
    write_whole(output / TRAINING_RECORD, (json.dumps(record, indent=2) + "\n").encode())
    console.log(f"held-out loss {loss:.3f} nats/token; wrote {output}")
    return True


def _task(model: PreTrainedModel, tokens: torch.Tensor, options: PretrainOptions, plan: Plan) -> LanguageModelling:
    # The model itself stays eager for measuring, where lengths vary.
    forward = torch.compile(model, dynamic=False) if options.compile else model

    def loss(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(model.device)
        with autocast(model.device):
            logits = forward(input_ids=rows[:, :-1].contiguous(), use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    context = min(options.size.context, len(tokens) - 1)
    length = min(options.length, context)
    rows, long_rows = (max(1, options.batch_tokens // n) for n in (length, context))
    return LanguageModelling(
        short=Batches(tokens, length, rows, options.seed),
        long=Batches(tokens, context, long_rows, options.seed + 1),
        long_from=round(plan.steps * (1 - options.long_fraction)),
        loss=loss,
    )


def _tokenizer(corpus: Corpus, output: Path, options: PretrainOptions) -> PreTrainedTokenizerBase:
    # A resumed run uses the tokenizer of its first start.
    if (output / "tokenizer.json").is_file():
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(output)
        return loaded
    texts = (piece.text for piece in corpus.training)
    tokenizer = train_tokenizer(texts, options.vocab_size, options.size.context)
    tokenizer.save_pretrained(output)
    return tokenizer
