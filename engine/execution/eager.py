"""EagerBackend: runs passes operator by operator on any torch device."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from engine.blocks.row_extras import kind_of, make_pass_extras
from engine.config import CompileProgress
from engine.errors import ModelError
from engine.execution.backend import Backend, ChainBatch, Part, PassOutput, RankedTokens
from engine.execution.batch import ForwardBatch, build
from engine.execution.forward_row import ForwardRow
from engine.execution.kv_tensors import KVTensors
from engine.models.causal_lm import CausalLM
from engine.protocols import SlotRow
from engine.sampling import noise
from engine.sampling.noise import Draws


class EagerBackend:
    """Runs a transformers model with our attention function and fused projections."""

    cache: ClassVar[type[KVTensors]] = KVTensors

    def __init__(self, model: CausalLM) -> None:
        """Try the model on a few tokens.

        Raises:
            ModelError: the model needs an unsupported attention feature, or does not fit into memory.
        """
        self.model = model
        self.info = model.info
        self.device = model.device
        self.reducer = None if model.shard is None else model.shard.reducer
        self._try()

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Compute a batch; see `Backend.run`."""
        logits = self.logits(batch)
        scores = logits if draws is None else noise.noised_logits(logits, draws)
        return PassOutput(logits, scores, scores.argmax(-1))

    def draw_chain(self, _chain: ChainBatch) -> tuple[Tensor, list[RankedTokens]] | None:
        """Do nothing: eager passes are launched one by one."""

    def plan_chains(self, num_steps: int, num_ranked: int) -> bool:
        """Return False: passes are launched one by one."""
        return False

    def wait(self) -> None:
        """Wait until every launched pass is over; on a CPU, `run` has waited already."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def is_busy(self) -> bool:
        """Whether a launched pass is not over."""
        return self.device.type == "cuda" and not torch.cuda.current_stream(self.device).query()

    @property
    def compiling(self) -> list[CompileProgress]:
        """Nothing is compiled in the background."""
        return []

    @torch.inference_mode()
    def assign(self, weights: Mapping[str, Tensor]) -> None:
        """Write weights in place; see `Backend.assign`."""
        parameters: dict[str, Tensor] = dict(self.model.module.named_parameters())
        for name, weight in weights.items():
            parameters[name].copy_(weight)

    def allocate_kv(self, num_blocks: int, block_size: int, num_slots: int = 0, depth: int = 0) -> KVTensors:
        """Allocate a KV cache for this model; see `Backend.allocate_kv`."""
        like = torch.empty(0, dtype=self.model.kv_dtype or self.model.dtype, device=self.device)
        try:
            kv = self._allocate_blocks(num_blocks, block_size, like)
            if (kind := kind_of(self.info)) is not None:
                kv.extras = make_pass_extras(kind, self.model, num_slots, depth)
        except RuntimeError as error:
            if self.device.type != "cpu":  # on a GPU, a process that has just ended may still hold memory
                raise
            problem = f"{self.info.name}: the memory has no room for {num_blocks:,} KV blocks of {block_size} tokens"
            raise ModelError(f"{problem}; lower num_blocks or num_states") from error
        return kv

    def _allocate_blocks(self, num_blocks: int, block_size: int, like: Tensor) -> KVTensors:
        return self.cache(self.model.kv_shape, num_blocks, block_size, like, *self.model.added_to_cache)

    def beside(self, part: Part, kv: KVTensors) -> tuple[Backend, KVTensors]:
        """Return a part of this model; see `Backend.beside`."""
        model = part(self.model)
        return EagerBackend(model), kv.first_layers(model.num_cached_layers, model.num_slot_layers)

    def warm_up(self, *, compile_missing: bool = True) -> None:
        """Do nothing: eager passes need no preparation."""

    def enter_thread(self) -> None:
        """Make this thread ready to run passes, because each thread has its own current GPU."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def close(self) -> None:
        """Leave the other ranks."""
        if self.reducer is not None:
            self.reducer.close()

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Compute [n, vocab] float32 logits."""
        return self.model.forward(batch).float()

    @torch.inference_mode()
    def _try(self) -> None:
        """Run a prompt and a step, so that unsupported attention features raise at load."""
        name = type(self.model.module).__name__
        try:
            kv = self.allocate_kv(2, 16, 2)
            first, then = (SlotRow(1, source) for source in (0, 1)) if kv.extras.num_slots else (None, None)
            input_length = int(self.info.start_id is not None)
            self.logits(build([ForwardRow([0, 0], 0, [1], 1, None, input_length, prompt_length=2, slot=first)], kv))
            step = build([ForwardRow([0], 2, [1], 1, None, input_length, slot=then)], kv)
            self.logits(step)
            layers = range(self.model.kv_shape.layers)  # others are added to the cache
            if not self.model.is_part and sorted(i for i in step.paged.layers if i in layers) != [*layers]:
                raise RuntimeError("not every layer attends once in a pass")
        except torch.OutOfMemoryError as error:
            raise ModelError(f"{self.info.name} does not fit into the memory of {self.device}: {error}") from error
        except Exception as error:
            raise ModelError(f"{name} cannot be run with paged attention: {error}") from error
