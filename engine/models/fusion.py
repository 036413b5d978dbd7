"""Fused projections: q/k/v and gate/up of each layer as one matrix product.

transformers calls the projections one after the other on the same input. The first of a fused run computes all of them
and keeps the rest for its siblings: unfused layers cost 5-15 % of decoding, and a compiler cannot repair that, because
it cannot concatenate parameters.
"""

import torch
from torch import Tensor, nn

_RUNS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear(nn.Module):
    """The first projection of a run: one product for all of them."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        weight = torch.cat(tuple(linear.weight for linear in linears))
        biases = [linear.bias for linear in linears]
        with torch.device("meta"):
            self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=biases[0] is not None)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        if biases[0] is not None:
            self.linear.bias = nn.Parameter(torch.cat(tuple(biases)), requires_grad=False)
        self.pending: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the first projection of `x` and keep the others."""
        parts: tuple[Tensor, ...] = self.linear(x).split(self.sizes, dim=-1)
        self.pending = list(parts[1:])
        return parts[0]


class FusedSibling(nn.Module):
    """A later projection of a run: hands out what the first one computed from the same input."""

    def __init__(self, owner: FusedLinear) -> None:
        super().__init__()
        self._owner = [owner]  # in a list, so that the owner is not registered twice

    def forward(self, _: Tensor) -> Tensor:
        """Return this projection of the input that the run's first member saw."""
        return self._owner[0].pending.pop(0)


def fuse_projections(module: nn.Module) -> None:
    """Fuse every run of plain linear layers that transformers' attention and MLP blocks call on one input."""
    for block in list(module.modules()):
        for run in _RUNS:
            linears = [getattr(block, name, None) for name in run]
            if not all(type(linear) is nn.Linear for linear in linears):
                continue
            found = [linear for linear in linears if isinstance(linear, nn.Linear)]
            if len({linear.bias is None for linear in found}) != 1:
                continue
            fused = FusedLinear(found)
            setattr(block, run[0], fused)
            for name in run[1:]:
                setattr(block, name, FusedSibling(fused))
