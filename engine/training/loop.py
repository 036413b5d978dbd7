"""The training loop and its optimizers, the same for a target and for a draft."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import nn

from engine.training.checkpoint import Checkpointer, TrainingError

MUON_LR = 7e-3
ADAMW_LR = 4e-3
WEIGHT_DECAY = 0.1
MICRO_BATCH_TOKENS = 2048
LOG_EVERY_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that determine a run's result, except models and corpus; most rows have `length` tokens."""

    batch_tokens: int
    length: int = 256
    seed: int = 0
    compile: bool = False


@dataclass(frozen=True)
class Task:
    """The objective: `batch` maps a step to token ids [rows, length + 1]; `loss` maps such rows to their mean loss."""

    batch: Callable[[int], torch.Tensor]
    loss: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """The number of steps, when to save and report, and the learning-rate schedule."""

    steps: int
    checkpoint_every_s: float = 180.0
    reports: int = 0
    lr_warmup: int = 40
    lr_cooldown: float = 0.5

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise TrainingError(f"--steps is {self.steps}; it must be at least 1")

    def lr_factor(self, step: int) -> float:
        """Return the factor of warm-up, plateau or decay; only the decay depends on `steps`, which may change later."""
        left = (self.steps - step) / max(1.0, self.lr_cooldown * self.steps)
        return min(1.0, (step + 1) / self.lr_warmup, left)


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context that computes in bfloat16 if that is faster: on CPUs, only with AMX."""
    # With AVX512-BF16 alone, products take up to twice as long as in float32 (oneDNN 3.12, Emerald Rapids).
    is_faster = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_amx_tile_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=is_faster)


def train(
    task: Task,
    plan: Plan,
    checkpointer: Checkpointer,
    console: Console,
    report: Callable[[int], None] = lambda step: None,
) -> None:
    """Train from the last checkpoint to the last step."""
    model, optimizers = checkpointer.model, checkpointer.optimizers
    step = checkpointer.restore()
    if step:
        console.log(f"resuming after step {step:,}")
    report_at = {plan.steps * i // (plan.reports + 1) for i in range(1, plan.reports + 1)}
    saved_at = logged_at = time.monotonic()
    with console.status("training") as status:
        while step < plan.steps:
            started = time.monotonic()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * plan.lr_factor(step)
            batch = task.batch(step)
            loss = accumulate_gradients(task, batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad(set_to_none=True)
            step += 1
            now = time.monotonic()
            rate = f"{batch[:, 1:].numel() / (now - started):,.0f} tokens/s"
            status.update(line := f"step {step:,}/{plan.steps:,} loss {loss:.3f} {rate}")
            if now - logged_at > LOG_EVERY_S:
                console.log(line)
                logged_at = now
            if step in report_at:
                report(step)
            if now - saved_at > plan.checkpoint_every_s:
                checkpointer.save(step)
                saved_at = time.monotonic()
    checkpointer.save(step)


def accumulate_gradients(task: Task, batch: torch.Tensor) -> float:
    """Accumulate a batch's gradients over micro-batches that fit into the CPU's cache; return the mean loss."""
    total = 0.0
    for rows in torch.split(batch, max(1, MICRO_BATCH_TOKENS // (batch.shape[1] - 1))):
        loss = task.loss(rows.contiguous()) * (len(rows) / len(batch))
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def make_optimizers(model: nn.Module, lr_scale: float = 1.0) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside layers and AdamW for all other parameters."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    tables = ("embed", "lm_head", "markov_w")
    hidden = {name: p for name, p in named.items() if p.ndim == 2 and not any(table in name for table in tables)}
    remaining = [parameter for name, parameter in named.items() if name not in hidden]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(hidden.values(), MUON_LR * lr_scale, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(remaining, lr=ADAMW_LR * lr_scale, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers
