"""Backend: a loaded model on a device, as drafters and verifiers use it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.config import CompileProgress, ModelInfo
from engine.execution.batch import ForwardBatch
from engine.execution.kv_tensors import KVTensors
from engine.models.causal_lm import CausalLM, Reducer
from engine.sampling.noise import Draws
from engine.sampling.row_shaping import RowShaping


class PassOutput(NamedTuple):
    """The result of a forward pass.

    Attributes:
        logits: [n, vocab] float32, at the batch's `logit_indices`; may be empty if the batch does not need them.
        scores: [n, vocab] float32, logits over temperature plus noise; empty where `logits` is empty.
        tokens: [n] int64, the argmax of the scores.
    """

    logits: Tensor
    scores: Tensor
    tokens: Tensor


RankedTokens = tuple[Tensor, Tensor]
"""The best scores of each row and their tokens, [n, m] each."""


@dataclass(frozen=True, slots=True)
class ChainBatch:
    """The passes that draw some requests' chains: each pass draws the next token of every chain.

    Attributes:
        first: the first pass, a row of logits for each request; its block tables have room for the whole chains.
        lengths: per row, the place of the token that the first pass draws.
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
    """Runs a model's forward passes on one device."""

    model: CausalLM
    info: ModelInfo
    device: torch.device
    reducer: Reducer | None
    """Sums tensors over ranks; None for a model that runs on one rank."""

    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Launch a pass: write the batch's keys and values to their slots, and return logits and drawn tokens.

        Later passes may use these tensors at once; the host may read them after `wait`. Without `draws`, the pass is
        greedy. All ranks draw the same tokens.
        """
        ...

    def plan_chains(self, num_steps: int, num_ranked: int) -> bool:
        """Let `warm_up` prepare chains of up to `num_steps` tokens; return whether `draw_chain` may be called."""
        ...

    def draw_chain(self, chain: ChainBatch) -> tuple[Tensor, list[RankedTokens]] | None:
        """Launch all passes of some chains at once; return None if they must be launched pass by pass.

        The result is [rows, passes] tokens, on the host after `wait`, and each pass's ranking, if tokens are ranked.
        """
        ...

    def wait(self) -> None:
        """Wait until every launched pass is over."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a launched pass is still running."""
        ...

    @property
    def compiling(self) -> list[CompileProgress]:
        """Progress of the models that are being compiled in the background."""
        ...

    def allocate_kv(self, num_blocks: int, block_size: int, num_slots: int = 0, depth: int = 0) -> KVTensors:
        """Allocate a KV cache; raise ModelError if a CPU's memory has no room for it.

        Block 0 and slot 0, which are for padding, are included in the numbers; see `PassExtras` for slots. `depth` is
        the most draft tokens of a row.
        """
        ...

    def beside(self, part: Part, kv: KVTensors) -> "tuple[Backend, KVTensors]":
        """Return the backend of another model, and its view of `kv`; both share this backend's memory.

        `part` returns that model (such as this model's first layers), or raises ModelError.
        """
        ...

    def warm_up(self, *, compile_missing: bool = True) -> None:
        """Start preparing faster passes, once all models and KV caches are allocated, and all chains planned.

        This includes the models of `beside`. Without `compile_missing`, only cached packages are used.
        """
        ...

    def assign(self, weights: Mapping[str, Tensor]) -> None:
        """Write weights in place by the names of the loaded parameters; passes, packages and graphs then read them.

        No pass may be under way, and no package may be compiling.
        """
        ...

    def enter_thread(self) -> None:
        """Prepare this thread for running passes; another thread may have loaded the model."""
        ...

    def close(self) -> None:
        """Free graphs and buffers, and leave the other ranks; no pass may follow."""
        ...
