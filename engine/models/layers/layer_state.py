"""The state of a linear layer: its size, and how tokens change it.

In every family `state' = decay * state + left (x) right`, so a cache can keep draft tokens' updates for later.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class StateShape(NamedTuple):
    """The size of a linear layer's state of one context."""

    channels: int  # of the convolution; 0 without a convolution
    taps: int  # inputs that the convolution keeps: its kernel size - 1
    heads: int = 0  # matrices [rows, columns]; 0 for a short convolution
    rows: int = 0
    columns: int = 0
    groups: int = 0  # right vectors, each for `heads / groups` consecutive heads
    decays: int = 1  # factors per head: 1, or as many as rows

    def num_bytes(self, depth: int, itemsize: int) -> int:
        """Return the bytes of a slot with `depth` updates; the convolution's inputs take `itemsize` bytes each."""
        update = self.heads * (self.decays + self.rows) + self.groups * self.columns
        matrices = self.heads * self.rows * self.columns + depth * update
        return 4 * matrices + itemsize * self.channels * (self.taps + depth)


class Update(NamedTuple):
    """How a token changes the states of n contexts, in float32."""

    decay: Tensor  # [n, heads, decays]
    left: Tensor  # [n, heads, rows]
    right: Tensor  # [n, groups, columns]


class LayerStates:
    """The slots of one layer.

    Attributes:
        inputs: [slots, taps + depth, channels] the convolution's inputs: committed tokens, then the draft's.
        matrices: [slots, heads, rows, columns] float32, after the last committed token.
        updates: [slots, depth, ...] each, by draft tokens.
    """

    def __init__(self, shape: StateShape, num_slots: int, depth: int, like: Tensor) -> None:
        """Allocate zeros, the state before the first token; `like` has the device and the inputs' dtype."""
        self.taps = shape.taps
        self.inputs = like.new_zeros(num_slots, shape.taps + depth, shape.channels)
        zeros = like.float().new_zeros
        self.matrices = zeros(num_slots, shape.heads, shape.rows, shape.columns)
        self.updates = Update(
            zeros(num_slots, depth, shape.heads, shape.decays),
            zeros(num_slots, depth, shape.heads, shape.rows),
            zeros(num_slots, depth, shape.groups, shape.columns),
        )


@dataclass(frozen=True)
class Recurrence(ABC):
    """How a family's linear layer computes; `by_chunk` is transformers' function for `chunk` tokens."""

    by_chunk: Callable[..., tuple[Tensor, Tensor]]
    chunk: int

    @abstractmethod
    def sizes(self, inputs: Sequence[Tensor]) -> tuple[int, int, int, int, int]:
        """Return heads, rows, columns, groups and decays of the state; see `StateShape`."""

    @abstractmethod
    def update(self, state: Tensor, inputs: Sequence[Tensor]) -> Update:
        """Return one token's update of n contexts, given the states [n, heads, rows, columns]; inputs: [n, ...]."""

    @abstractmethod
    def output(self, state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return [n, heads, size], given the state after the token."""

    @abstractmethod
    def _scan_chunk(self, state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return what `scan` does for at most a chunk, [1, tokens, ...] each."""

    def scan(self, state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute a context's next tokens chunk by chunk, because for several chunks Mamba 2's function adds otherwise.

        Returns [tokens, heads, size] and the last state, [heads, rows, columns] as `state`; inputs: [tokens, ...].
        """
        outputs, states = [], state.unsqueeze(0)
        for start in range(0, len(inputs[0]), self.chunk):
            output, states = self._scan_chunk(states, [tensor[None, start : start + self.chunk] for tensor in inputs])
            outputs.append(output[0])
        return torch.cat(outputs), states[0]


class StateContext(Protocol):
    """Linear layers' access to the states of a pass's rows; `layer` counts linear layers only."""

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return each context's causal convolution, [tokens, channels], and keep the inputs.

        inputs: [tokens, channels]; weight: [channels, kernel]; bias: [channels].
        """
        ...

    def recur(self, layer: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Return a linear layer's outputs [tokens, heads, size], and keep the states; inputs: [tokens, ...] each."""
        ...


def updated(state: Tensor, update: Update) -> Tensor:
    """Return the state [n, heads, rows, columns] after an update."""
    right = update.right.repeat_interleave(state.shape[1] // update.right.shape[1], 1)
    return (update.decay.unsqueeze(-1) * state).addcmul_(update.left.unsqueeze(-1), right.unsqueeze(-2))
