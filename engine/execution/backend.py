"""Backend: a loaded model on a device, as drafters and verifiers use it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.config import CompileProgress, ModelInfo
from engine.execution.batch import ForwardBatch
from engine.execution.kv_tensors import KVTensors
from engine.models.causal_lm import CausalLM
from engine.models.layers.reducer import Reducer
from engine.sampling.noise import Draws
from engine.sampling.row_shaping import RowShaping


class PassOutput(NamedTuple):
    """The result of a forward pass.

    Attributes:
        logits: [n, vocab] float32, at the batch's `logit_indices`; may be empty if the batch does not need them.
        scores: [n, vocab] float32, logits over temperature plus noise; likewise.
        tokens: [n] int64, the argmax of the scores, over all ranks.
    """

    logits: Tensor
    scores: Tensor
    tokens: Tensor


RankedTokens = tuple[Tensor, Tensor]
"""The best scores of each row and their tokens, [n, m] each."""


@dataclass(frozen=True, slots=True)
class ChainBatch:
    """The passes that draw some requests' chains, one token each per pass.

    Attributes:
        first: the first pass, a row of logits for each request; its block tables have room for the whole chains.
        draws: one per pass; lengths: per row, the place of the token that the first pass draws.
        num_ranked: how many possible tokens are ranked at each position.
        shaping: what `row_shaping` returns; None if no row needs shaping.
    """

    first: ForwardBatch
    draws: Sequence[Draws]
    lengths: Sequence[int]
    num_ranked: int
    shaping: tuple[RowShaping, Tensor] | None


Part = Callable[[CausalLM], CausalLM]


class Backend(Protocol):
    """Runs a model's forward passes; loading, compiling and memory are up to each implementation."""

    model: CausalLM
    info: ModelInfo
    device: torch.device
    reducer: Reducer | None
    """Combines this rank's tensors with the others'; None for a model by itself."""

    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Launch a pass: write the batch's keys and values to their slots, and return logits and drawn tokens.

        Later passes may use these tensors at once; the host may read them after `wait`.

        Args:
            draws: temperature and noise of every logit row; None for greedy draws. All ranks draw alike.
        """
        ...

    def plan_chains(self, num_steps: int, num_ranked: int) -> bool:
        """Return whether `draw_chain` may be called; `warm_up` prepares for chains of up to `num_steps` tokens."""
        ...

    def draw_chain(self, chain: ChainBatch) -> tuple[Tensor, list[RankedTokens]] | None:
        """Launch all passes of some chains at once; None if they must be launched one by one.

        Returns:
            [rows, passes] tokens, on the host after `wait`, and each pass's ranking, if tokens are to be ranked.
        """
        ...

    def wait(self) -> None:
        """Wait until every launched pass is over."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a launched pass is not over."""
        ...

    @property
    def compiling(self) -> list[CompileProgress]:
        """How far each model is that is compiled in the background now."""
        ...

    def allocate_kv(self, num_blocks: int, block_size: int, num_slots: int = 0, depth: int = 0) -> KVTensors:
        """Allocate a KV cache for this model; `num_blocks` includes block 0.

        Args:
            num_slots: what the kind of cache keeps beside blocks, slot 0 included; see `PassExtras`.
            depth: the most draft tokens of a row.

        Raises:
            ModelError: a CPU's memory has no room for it.
        """
        ...

    def beside(self, part: Part, kv: KVTensors) -> "tuple[Backend, KVTensors]":
        """Return the backend of another model in this one's process, and its view of the KV cache.

        Both share their memory with this backend and `kv`; `warm_up` prepares their passes, too.

        Args:
            part: returns the other model: this one's first layers, or the head that is loaded with it.

        Raises:
            ModelError: there is no such part.
        """
        ...

    def warm_up(self, *, compile_missing: bool = True) -> None:
        """Start preparing faster passes; call this once all models and KV caches are allocated, and all chains planned.

        Args:
            compile_missing: whether to compile missing packages in the background.
        """
        ...

    def enter_thread(self) -> None:
        """Make this thread ready to run passes; it need not be the one that loaded the model."""
        ...

    def close(self) -> None:
        """Free what a rank must free before it leaves the others, and leave them; no pass may follow."""
        ...
