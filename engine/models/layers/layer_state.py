"""The state of a linear layer: its size, how a token changes it, and what a family's recurrence computes.

Every family's state changes by `state' = decay * state + left (x) right`. So a cache can keep the updates of draft
tokens, and apply those that were accepted later, whatever the family.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class StateShape(NamedTuple):
    """The size of what one linear layer keeps of a context.

    Attributes:
        channels: of its convolution; 0 without one.
        taps: the inputs that the convolution keeps, one less than its kernel has.
        heads: its matrices, [rows, columns] each; 0 for a short convolution.
        groups: the distinct right vectors of an update; each serves `heads / groups` heads in a row.
        decays: factors per head of an update: 1, or one per row.
    """

    channels: int
    taps: int
    heads: int = 0
    rows: int = 0
    columns: int = 0
    groups: int = 0
    decays: int = 1

    def num_bytes(self, depth: int, itemsize: int) -> int:
        """Return the bytes of a slot that keeps `depth` updates, if the convolution's inputs take `itemsize` each."""
        update = self.heads * (self.decays + self.rows) + self.groups * self.columns
        matrices = self.heads * self.rows * self.columns + depth * update
        return 4 * matrices + itemsize * self.channels * (self.taps + depth)


class Update(NamedTuple):
    """What one token of n contexts does to their states.

    Attributes:
        decay: [n, heads, decays] float32.
        left: [n, heads, rows] float32.
        right: [n, groups, columns] float32.
    """

    decay: Tensor
    left: Tensor
    right: Tensor


class LayerStates:
    """The slots of one layer.

    Attributes:
        inputs: [slots, taps + depth, channels] the convolution's inputs: the last committed ones, then the draft's.
        matrices: [slots, heads, rows, columns] float32, after the last committed token.
        updates: of the draft tokens, [slots, depth, ...] each.
    """

    def __init__(self, shape: StateShape, num_slots: int, depth: int, like: Tensor) -> None:
        """Allocate zeros, which are also the state before the first token; `like` gives device and inputs' format."""
        self.taps = shape.taps
        self.inputs = like.new_zeros(num_slots, shape.taps + depth, shape.channels)
        zeros = like.float().new_zeros
        self.matrices = zeros(num_slots, shape.heads, shape.rows, shape.columns)
        self.updates = Update(
            zeros(num_slots, depth, shape.heads, shape.decays),
            zeros(num_slots, depth, shape.heads, shape.rows),
            zeros(num_slots, depth, shape.groups, shape.columns),
        )


class Recurrence(Protocol):
    """How a family's linear layer computes; its inputs and states are those of one layer."""

    def update(self, state: Tensor, inputs: Sequence[Tensor]) -> Update:
        """Return the update of one token of n contexts, given the state [n, heads, rows, columns] before it.

        Args:
            inputs: [n, ...] each.
        """
        ...

    def output(self, state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return [n, heads, size], given the state after the token."""
        ...

    def scan(self, state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute consecutive tokens of one context in chunks, the first of which starts with the first token.

        Args:
            state: [heads, rows, columns] before the first token.
            inputs: [tokens, ...] each.

        Returns:
            [tokens, heads, size], and the state after the last token.
        """
        ...


class StateContext(Protocol):
    """The access of linear layers to the states of one forward pass's rows."""

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the causal convolution of each token's context, [tokens, channels], and keep the inputs.

        Args:
            layer: the linear layer's index among such layers.
            inputs: [tokens, channels].
            weight: [channels, kernel].
            bias: [channels].
        """
        ...

    def recur(self, layer: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Return a linear layer's outputs [tokens, heads, size], and keep the states; `layer` as in `convolve`.

        Args:
            inputs: [tokens, ...] each.
        """
        ...


def updated(state: Tensor, update: Update) -> Tensor:
    """Return the state [n, heads, rows, columns] after an update."""
    right = update.right.repeat_interleave(state.shape[1] // update.right.shape[1], 1)
    return (update.decay.unsqueeze(-1) * state).addcmul_(update.left.unsqueeze(-1), right.unsqueeze(-2))
