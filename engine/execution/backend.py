"""Backend: a loaded model on a device, and all that a drafter or a verifier may ask of it."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.config import ModelInfo
from engine.execution.attention import KVTensors
from engine.execution.batch import ForwardBatch
from engine.sampling.noise import Draws


class PassOutput(NamedTuple):
    """What a forward pass computes.

    Attributes:
        logits: [n, vocab] float32, at the batch's `logit_indices`.
        scores: [n, vocab] float32, logits over temperature plus noise.
        tokens: [n] int64, the argmax of the scores.
    """

    logits: Tensor
    scores: Tensor
    tokens: Tensor


class Backend(Protocol):
    """Runs a model's forward passes. Loading, compiling and placing its memory are the backend's own business."""

    info: ModelInfo
    device: torch.device

    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Compute a batch: keys and values go to their slots, logits and drawn tokens come back.

        Args:
            draws: temperature and noise of every logit row; None draws greedily.
        """
        ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVTensors:
        """Allocate a KV cache for this model, block 0 included."""
        ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum a tensor over the ranks that share the model, in place where there are several, and return it."""
        ...

    def warm_up(self, *, compile_missing: bool = True) -> None:
        """Begin whatever makes later passes faster; call it once models and KV caches are in place.

        Args:
            compile_missing: whether to compile, in the background, what no earlier run has compiled.
        """
        ...
