"""The states of linear layers: their sizes, and how a token changes one."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class StateShape(NamedTuple):
    """The size of one linear layer's state.

    Attributes:
        channels, taps: the inputs that its convolution keeps, kernel size - 1 of them; 0, 0 without.
        heads, rows, columns: its matrices; 0 heads for a short convolution.
        groups: distinct right vectors of an update; `heads` is a multiple.
        decays: the numbers per head that a matrix is multiplied by: 1, or one per row.
    """

    channels: int
    taps: int
    heads: int
    rows: int
    columns: int
    groups: int
    decays: int


class Update(NamedTuple):
    """How n tokens change the matrices before them.

    Attributes:
        decay: [n, heads, decays] float32.
        left: [n, heads, rows].
        right: [n, groups, columns].
    """

    decay: Tensor
    left: Tensor
    right: Tensor


class Recurrence(Protocol):
    """How a linear layer computes states and outputs."""

    def update(self, state: Tensor, inputs: Sequence[Tensor]) -> Update:
        """Return the update by one token of n contexts each, with the states [n, heads, rows, columns] before it."""
        ...

    def output(self, state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the outputs [n, heads, size] of these tokens, with the states after them."""
        ...

    def scan(self, state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the outputs [t, heads, size] of t tokens of one context, and the state after them.

        Args:
            state: [heads, rows, columns] before the first of them.
        """
        ...


def updated(state: Tensor, update: Update) -> Tensor:
    """Return decay * state + left (x) right, [n, heads, rows, columns]."""
    right = update.right.repeat_interleave(state.shape[1] // update.right.shape[1], dim=1)
    return update.decay.unsqueeze(-1) * state + update.left.unsqueeze(-1) * right.unsqueeze(-2)
