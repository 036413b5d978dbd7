"""EagerBackend: runs passes operator by operator on any torch device."""

import logging
from collections.abc import Collection

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.execution.attention import KVTensors
from engine.execution.backend import Backend, PassOutput
from engine.execution.batch import ForwardBatch, ForwardRow, build
from engine.models import encoder_decoder
from engine.models.causal_lm import CausalLM, forward
from engine.models.sub_layers import thin
from engine.sampling import noise
from engine.sampling.noise import Draws

logger = logging.getLogger(__name__)


class EagerBackend:
    """Runs a transformers model with our attention function and fused projections."""

    def __init__(self, model: CausalLM) -> None:
        """Run the model on two tokens, to fail at load if it cannot be served.

        Raises:
            ModelError: the model needs an unsupported attention feature, or does not fit into memory.
        """
        self.model = model
        self.info = model.info
        self.device = model.device
        self.windows = self._try()

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Compute a batch; see `Backend.run`."""
        logits = self.logits(batch)
        scores = logits if draws is None else noise.noised_logits(logits, draws)
        return PassOutput(logits, scores, scores.argmax(-1))

    def wait(self) -> None:
        """Wait until every launched pass is over; on a CPU, `run` itself has waited."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def is_busy(self) -> bool:
        """Whether a launched pass is not over."""
        return self.device.type == "cuda" and not torch.cuda.current_stream(self.device).query()

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVTensors:
        """Allocate a KV cache for this model."""
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        return KVTensors(self.model.kv_shape, num_blocks, block_size, like)

    def thin(self, skipped: Collection[str], kv: KVTensors) -> tuple[Backend, KVTensors]:
        """Return this model without some of its sub-layers; see `Backend.thin`."""
        model, layers = thin(self.model, skipped)
        return EagerBackend(model), kv.of_layers(layers)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum a tensor over the model's tensor-parallel ranks."""
        shard = self.model.shard
        return partial if shard is None else shard.all_reduce(partial.to(self.device))

    def warm_up(self, *, compile_missing: bool = True) -> None:
        """Do nothing: eager passes need no preparation."""

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Compute [n, vocab] float32 logits."""
        module = self.model.module
        if self.info.decoder_start_id is not None:
            return encoder_decoder.compute(module, batch).float()
        return forward(module, batch.token_ids, batch.positions, batch.logit_indices, batch.paged).float()

    @torch.inference_mode()
    def _try(self) -> list[int | None]:
        """Run two tokens through every layer, so that unsupported attention features raise here and not in a round.

        Returns:
            The attention windows that the layers use.
        """
        name = type(self.model.module).__name__
        try:
            kv = self.allocate_kv(2, 16)
            encoder_length = int(self.info.decoder_start_id is not None)
            self.logits(build([ForwardRow([0, 0], 0, [1], 1, None, encoder_length)], kv))
            step = build([ForwardRow([0], 2, [1], 1, None, encoder_length)], kv)
            self.logits(step)
            if sorted(step.paged.layers) != list(range(self.model.kv_shape.layers)):
                raise RuntimeError("not every layer attends once in a pass")
        except torch.OutOfMemoryError as error:
            raise ModelError(f"{self.info.name} does not fit into the memory of {self.device}: {error}") from error
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise ModelError(f"{name} cannot be run with paged attention: {error}") from error
        return step.paged.groups[0].windows


def log_loaded(backend: EagerBackend, seconds: float) -> None:
    """Log the model, its size and device, and how long loading took."""
    info = backend.info
    size = f"{info.num_parameters / 1e6:.1f} M parameters in {info.dtype}"
    logger.info("%s: %s on %s, loaded in %.1f s", info.name, size, info.device, seconds)
