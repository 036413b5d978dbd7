"""`head`: trains a head to draft for a target from the outputs of the target's layers.

EAGLE-3 and DFlash learn the target's distribution (forward KL divergence). DSpark reduces the total variation, which
bounds how often two draws with the same noise differ, and learns its confidence: 1 minus that variation.

A head is unrolled over texts: it drafts from many places at once, each time after the text's true tokens. Up to the
first rejected token these are the logits of serving, so one unrolling decides all rounds, as in `measured_acceptance`.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.config import BUNDLED, BUNDLED_TARGET, ModelConfig
from engine.heads.dense_context import read_target
from engine.heads.head import NEVER, Head
from engine.heads.registry import load_head
from engine.heads.unrolling import unroll
from engine.models.registry import open_model
from engine.training.checkpoint import Checkpointer, TrainingError
from engine.training.corpus import read_corpus, render, tokenize
from engine.training.distill import (
    REPORT_K,
    DistillOptions,
    continue_held_out,
    continue_training_text,
    mixed_batches,
)
from engine.training.loop import Plan, Task, autocast, make_optimizers, train
from engine.training.measured_acceptance import Acceptance, Continuations, acceptance_table, draw
from engine.training.new_head import HeadShape, make_head, save_head, start_from
from engine.training.small_model import load_model

EAGLE_DECAY = 0.8
"""Weight of a pass of the training-time test, relative to the pass before it."""
VARIATION_WEIGHT = 0.9
TEMPERATURES = (1.0, 0.7, 1.0, 0.4)
"""Compared in turn over the rows of a batch, because drafts are drawn at any temperature."""
_START_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class HeadOptions(DistillOptions):
    """The options of `head`."""

    shape: HeadShape = field(default_factory=HeadShape)


def weights_of(kind: str, num_places: int) -> Tensor:
    """Return the weight of each place of a draft in the loss, [num_places]; their mean is 1."""
    places = torch.arange(num_places)
    decay = {"eagle3": EAGLE_DECAY, "dflash": math.exp(-2 / num_places), "dspark": 1.0}[kind]
    weights = decay**places
    return weights / weights.mean()


def losses(kind: str, logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the total variation of each row, [...]; both logits are [..., vocab]."""
    log_probs, target_log_probs = logits.float().log_softmax(-1), target_logits.float().log_softmax(-1)
    target_probs = target_log_probs.exp()
    divergence = (target_probs * (target_log_probs - log_probs)).sum(-1)
    variation = (log_probs.exp() - target_probs).abs().sum(-1) / 2
    if kind != "dspark":
        return divergence, variation
    return VARIATION_WEIGHT * variation + (1 - VARIATION_WEIGHT) * divergence, variation


def train_head(
    paths: list[Path],
    target_folder: Path,
    start: Path | None,
    draft: Path | None,
    output: Path,
    options: HeadOptions,
    plan: Plan,
    console: Console,
) -> None:
    """Train a head, which may start from a head (`start`) or a draft model (`draft`), and write it to `output`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, tokenizer = load_model(target_folder, device)
    corpus = read_corpus(paths)
    tokens = tokenize(render(corpus.training, tokenizer), tokenizer)
    held_out = continue_held_out(target, tokenizer, corpus)
    continued = continue_training_text(target, tokens, output, options, console) if options.continuations else None
    text = tokens if continued is None else continued.flatten()
    if start is not None:
        source, target_source = (open_model(ModelConfig(str(folder))) for folder in (start, target_folder))
        head = load_head(source, target_source, target, device, torch.float32, 0)
    else:
        like = None if draft is None else load_model(draft, device)[0]
        counts = torch.bincount(text, minlength=target.config.vocab_size)
        head = nn.Module.to(make_head(options.shape, target, counts, like), device)
        if like is not None:
            length = min(options.length, len(text))
            rows = min(_START_ROWS, len(text) // length)
            start_from(head, like, target, text[: rows * length].view(rows, length).to(device))
    head.requires_grad_(True).train()
    for shared in (head.embed_tokens, head.lm_head):
        shared.requires_grad_(False)
    if head.config.kind == "dspark":
        add_confidence(head)
    num_weights = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    console.log(f"{len(tokens):,} training tokens, a {head.config.kind} head of {num_weights / 1e6:.2f} M weights")
    checkpointer = Checkpointer(output, asdict(options), head, make_optimizers(head, options.lr_scale))

    def report(when: str) -> None:
        measured = {text.temperature: head_acceptance(head, target, text, REPORT_K) for text in held_out}
        console.print(acceptance_table(measured, REPORT_K, f"acceptance on held-out prompts, {when}, k = {REPORT_K}"))

    if not checkpointer.path.exists():
        report("after 0 steps")
    context = min(target.config.max_position_embeddings, len(tokens) - 1)
    task = Task(mixed_batches(tokens, continued, options, context), loss_of(head, target, options))
    train(task, plan, checkpointer, console, lambda step: report(f"after {step:,} steps"))
    name = BUNDLED if target_folder.resolve() == BUNDLED_TARGET.resolve() else str(target_folder)
    save_head(output, head, target, name)
    console.log(f"wrote {output}")
    report("after training")


def add_confidence(head: Head) -> None:
    """Add DSpark's confidence head, which only training reads, and let passes keep its input vectors."""
    config, confidence = head.config, nn.Module()
    device = head.get_parameter("fc.weight").device
    confidence.proj = nn.Linear(config.layers.hidden_size + config.markov_rank, 1, device=device)
    head.confidence_head = confidence
    markov: Any = head.get_submodule("markov_head")
    markov.reads_hidden = True


def loss_of(head: Head, target: PreTrainedModel, options: HeadOptions) -> Any:
    """Return the loss function of rows [rows, length + 1]."""
    config = head.config
    num_places = min(config.max_draft_tokens, options.shape.block_size)
    weights = weights_of(config.kind, num_places)
    row_losses = torch.compile(losses, dynamic=True) if options.compile else losses
    left_out = torch.ones(config.vocab_size, dtype=torch.bool)
    left_out[slice(None) if head.target_ids is None else head.target_ids.cpu()] = False

    def loss(rows: Tensor) -> Tensor:
        device = head.get_parameter("fc.weight").device
        token_ids = rows[:, :-1].contiguous().to(device)
        length = token_ids.shape[1]
        # Each token is drafted about once; the starts depend on the text alone.
        first = 1 + int(token_ids.sum()) % num_places
        if length - num_places < first:
            raise TrainingError(f"rows of {length} tokens are too short for drafts of {num_places}")
        starts = torch.arange(first, length - num_places + 1, num_places, device=device).expand(len(rows), -1)
        with autocast(device):
            taps, target_logits = read_target(target, config.taps, token_ids)
            drafts = unroll(head, token_ids, head.feature(taps), starts, num_places)
        at = starts.unsqueeze(-1) + torch.arange(num_places, device=device)
        target_rows = target_logits[torch.arange(len(rows), device=device)[:, None, None], at]
        temperatures = torch.tensor(TEMPERATURES, device=device)[torch.arange(len(rows), device=device) % 4]
        temperatures = temperatures.view(-1, 1, 1, 1)
        target_rows = (target_rows / temperatures).masked_fill(left_out.to(device), NEVER)
        values, variation = row_losses(config.kind, drafts.logits / temperatures, target_rows)
        result: Tensor = (values * weights.to(device)).mean()
        if config.kind == "dspark":
            assert drafts.hidden is not None
            embedded = head.get_submodule("markov_head.markov_w1")(drafts.previous)
            confidence = head.get_submodule("confidence_head.proj")(torch.cat([drafts.hidden, embedded], -1))
            result = result + F.binary_cross_entropy_with_logits(
                confidence.squeeze(-1).float(), 1 - variation.detach().clamp(0, 1)
            )
        return result

    return loss


@torch.inference_mode()
def head_acceptance(head: Head, target: PreTrainedModel, continuations: Continuations, k: int) -> Acceptance:
    """Draft at most `k` tokens from every place of the target's continuations, and compare with its text."""
    k = min(k, head.config.max_draft_tokens)
    rows = []
    for seed, (ids, begin, end) in enumerate(continuations.texts()):
        starts = torch.arange(max(1, begin - 1), end - k, device=ids.device)
        places = (starts.unsqueeze(-1) + 1 + torch.arange(k, device=ids.device)).flatten()
        taps, _ = read_target(target, head.config.taps, ids[None])
        logits = unroll(head, ids[None], head.feature(taps), starts[None], k).logits.flatten(0, 2)
        drawn = draw(logits, continuations.temperature, [seed] * len(places), places.tolist())
        rows.append((drawn == ids[places]).view(-1, k).long().cumprod(-1).sum(-1).tolist())
    return Acceptance(rows, reach=k)
