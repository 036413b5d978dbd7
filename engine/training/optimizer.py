"""Muon for the hidden matrices, AdamW for embeddings and norms, and the learning-rate schedule.

`torch.optim.Muon` is not used, because it orthogonalises one matrix at a time and in bfloat16, which on a CPU without
bfloat16 units took as long as the backward pass. Here matrices of one shape are stacked and iterated together in
float32.

Muon: https://kellerjordan.github.io/posts/muon/ ; the step is scaled to AdamW's size as in
https://arxiv.org/abs/2502.16982.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

MUON_LR = 7e-3
ADAMW_LR = 4e-3
WEIGHT_DECAY = 0.1
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Move all singular values towards 1 by Newton-Schulz iteration. matrices: [n, rows, columns]."""
    a, b, c = _COEFFICIENTS
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    x = wide / wide.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x if matrices.shape[1] <= matrices.shape[2] else x.mT
    return result


class Muon(torch.optim.Optimizer):
    """SGD with orthogonalised momentum; one parameter group per matrix shape."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = MUON_LR, momentum: float = 0.95) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for param in params:
            shapes.setdefault(param.shape, []).append(param)
        groups = [{"params": same} for same in shapes.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": WEIGHT_DECAY})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one update to every matrix that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            directions = []
            for param in params:
                buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                directions.append(param.grad.lerp(buffer, group["momentum"]))  # Nesterov
            if not params:
                continue
            scale = 0.2 * math.sqrt(max(params[0].shape))
            for param, update in zip(params, orthogonalize(torch.stack(directions)), strict=True):
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-group["lr"] * scale)


def make_optimizers(model: nn.Module, lr_scale: float = 1.0) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside layers and AdamW for all other parameters."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    hidden = [p for n, p in named if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        optimizers.append(Muon(hidden, lr=MUON_LR * lr_scale))
    optimizers.append(torch.optim.AdamW(rest, lr=ADAMW_LR * lr_scale, betas=(0.9, 0.95), weight_decay=0.0))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def lr_factor(step: int, steps: int, warmup: int = 40, cooldown: float = 0.5) -> float:
    """Return the schedule's factor: warm-up, plateau, then linear decay to zero over the last `cooldown` of the run.

    Nothing before the decay depends on the number of steps, so a resumed run can change it.
    """
    left = (steps - step) / max(1.0, cooldown * steps)
    return min(1.0, (step + 1) / warmup, left)


def set_lr(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to a fraction of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
