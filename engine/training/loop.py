"""The training loop, the same for a target and for a draft."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from engine.execution.registry import resolve_dtype
from engine.training.checkpoint import Checkpointer
from engine.training.errors import TrainingError
from engine.training.optimizer import lr_factor, set_lr

MICRO_BATCH_TOKENS = 2048
LOG_EVERY_S = 20.0


class Task(Protocol):
    """The training objective: its batches and their loss."""

    def batch(self, step: int) -> torch.Tensor:
        """Return the token ids of a step, [rows, length + 1], which depend on `step` alone."""
        ...

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of rows [rows, length + 1], a scalar."""
        ...


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


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context that computes in bfloat16 where that is the default for serving; elsewhere it is slower."""
    return torch.autocast(device.type, torch.bfloat16, enabled=resolve_dtype("auto", device) is torch.bfloat16)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Catch Ctrl-C and SIGTERM in a flag, so that a run stops between steps."""
    stopped: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        signal.signal(number, previous[signal.Signals(number)])  # the second signal ends the process

    previous = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(stopped)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def train(
    task: Task,
    plan: Plan,
    checkpointer: Checkpointer,
    console: Console,
    report: Callable[[int], None] = lambda step: None,
) -> bool:
    """Train from the last checkpoint to the last step; return False if interrupted."""
    model, optimizers = checkpointer.model, checkpointer.optimizers
    step = checkpointer.restore()
    if step:
        console.log(f"resuming after step {step:,}")
    report_at = {plan.steps * i // (plan.reports + 1) for i in range(1, plan.reports + 1)}
    saved_at = logged_at = time.monotonic()
    with _progress(console) as progress, interruptible() as is_stopped:
        bar = progress.add_task("training", total=plan.steps, completed=step, rate="", loss="")
        while step < plan.steps and not is_stopped():
            started = time.monotonic()
            set_lr(optimizers, lr_factor(step, plan.steps, plan.lr_warmup, plan.lr_cooldown))
            batch = task.batch(step)
            loss = accumulate_gradients(task, batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad(set_to_none=True)
            step += 1
            now = time.monotonic()
            rate = f"{batch[:, 1:].numel() / (now - started):,.0f} tokens/s"
            progress.update(bar, advance=1, loss=f"loss {loss:.3f}", rate=rate)
            if not console.is_terminal and now - logged_at > LOG_EVERY_S:
                console.log(f"step {step:,}/{plan.steps:,} loss {loss:.3f} {rate}")
                logged_at = now
            if step in report_at:
                report(step)
            if now - saved_at > plan.checkpoint_every_s:
                checkpointer.save(step)
                saved_at = time.monotonic()
    checkpointer.save(step)
    if step < plan.steps:
        console.log(f"stopped after step {step:,}; run the same command again to continue")
    return step >= plan.steps


def accumulate_gradients(task: Task, batch: torch.Tensor) -> float:
    """Accumulate a batch's gradients over micro-batches that fit into the CPU's cache; return the mean loss."""
    micro_batches = torch.split(batch, max(1, MICRO_BATCH_TOKENS // (batch.shape[1] - 1)))
    total = 0.0
    for rows in micro_batches:
        loss = task.loss(rows.contiguous()) * (len(rows) / len(batch))
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
