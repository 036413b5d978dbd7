"""CudaBackend: compiled layers and CUDA graphs, in which a token has the same bits in every batch.

In 16-bit formats two tokens can have almost equal scores, so rounding that depends on the batch could change a text.
Here attention splits a context in one way, matrix products never split their inner dimension, and layers are compiled
once for every number of tokens.
"""

import itertools
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import TritonError  # type: ignore[import-untyped]

from engine.config import CompileProgress, EngineConfig, ModelConfig
from engine.errors import ModelError
from engine.execution.attention import Group
from engine.execution.backend import ChainBatch, Part, PassOutput, RankedTokens
from engine.execution.batch import ForwardBatch, build
from engine.execution.cuda.chain_pass import ChainShape, chain_shapes
from engine.execution.cuda.compiled_layers import TritonContext, compile_layers, uncompile_layers
from engine.execution.cuda.graphs import MAX_TOKENS, GraphRecorder, Graphs, prompt_shapes, shapes, table_width
from engine.execution.cuda.kernels import draw_kernel
from engine.execution.cuda.kernels.triton_attention import MAX_DIM, MAX_SPLIT_LENGTH
from engine.execution.cuda.linear import MAX_KERNEL_ROWS, make_invariant
from engine.execution.cuda.static_pass import NUM_EXTRA, Shape
from engine.execution.eager import EagerBackend
from engine.execution.forward_row import ForwardRow
from engine.execution.kv_tensors import KVTensors
from engine.models.causal_lm import CausalLM, forward
from engine.sampling import noise
from engine.sampling.noise import Draws
from engine.stats.preparation import PREPARATION

logger = logging.getLogger(__name__)


class GraphedKV(KVTensors):
    """A KV cache with its graphs, which are None until `warm_up`; batches for it are built on the host."""

    has_stacks = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.input_device = torch.device("cpu")
        self.graphs: Graphs | None = None


class CudaBackend(EagerBackend):
    """Runs a model on a GPU: with Triton attention at first, compiled and as graphs after `warm_up`."""

    cache = GraphedKV

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        engine: EngineConfig,
        *,
        invariant: bool = True,
        branches: Sequence[int] = (),
        recorder: GraphRecorder | None = None,
    ) -> None:
        """Choose how products and noise are computed: with `invariant`, a token has the same bits in every batch."""
        try:
            make_invariant(model.module, model.dtype, invariant=invariant)
        except torch.OutOfMemoryError as error:  # it multiplies large random matrices
            raise ModelError(f"{model.info.name} does not fit into the memory of {model.device}: {error}") from error
        noise.IMPLEMENTATIONS["cuda"] = draw_kernel.gumbel
        self._config, self._engine, self._branches, self._recorder = config, engine, branches, recorder
        self._is_invariant, self._is_compiled = invariant, False
        self._caches: weakref.WeakSet[GraphedKV] = weakref.WeakSet()
        self._beside: list[CudaBackend] = []
        self._progress: CompileProgress | None = None
        self._chains: set[tuple[int, int]] = set()
        super().__init__(model)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Launch a pass; see `Backend.run`."""
        kv = batch.paged.kv
        assert isinstance(kv, GraphedKV)
        if kv.graphs is not None and (output := kv.graphs.run(batch, draws)) is not None:
            return output
        return super().run(batch, draws and draws.to(self.device))

    def plan_chains(self, num_steps: int, num_ranked: int) -> bool:
        """Record chains at warm-up; see `Backend.plan_chains`."""
        self._chains.add((num_steps, num_ranked))
        return self._config.compile != "off"

    @torch.inference_mode()
    def draw_chain(self, chain: ChainBatch) -> tuple[Tensor, list[RankedTokens]] | None:
        """Launch a graph; see `Backend.draw_chain`."""
        kv = chain.first.paged.kv
        assert isinstance(kv, GraphedKV)
        return None if kv.graphs is None else kv.graphs.draw_chain(chain)

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Compute [n, vocab] float32 logits."""
        groups = [part for group in batch.paged.groups for part in _parts_on(group, self.device)]
        token_ids, indices = (
            tensor.to(self.device, non_blocking=True) for tensor in (batch.token_ids, batch.logit_indices)
        )
        if (count := len(indices)) == 1:  # see below; some norms compute these tokens only
            indices = F.pad(indices, (0, 1), value=-1)
        if len(token_ids) == 1:  # a layer compiled for one token alone could round differently
            token_ids, groups = F.pad(token_ids, (0, 1)), [_with_padding(*groups)]
        positions = torch.cat([group.positions.flatten() for group in groups]).long()
        with TritonContext(batch.paged.kv, groups, layers=batch.paged.layers).current() as context:
            return forward(self.model.module, token_ids, positions, indices, context)[:count].float()

    def allocate_kv(self, num_blocks: int, block_size: int, num_slots: int = 0, depth: int = 0) -> KVTensors:
        """Allocate a KV cache for this model; see `Backend.allocate_kv`."""
        kv = super().allocate_kv(num_blocks, block_size, num_slots, depth)
        assert isinstance(kv, GraphedKV)
        self._caches.add(kv)
        return kv

    def beside(self, part: Part, kv: KVTensors) -> "tuple[CudaBackend, KVTensors]":
        """Return a part of this model; see `Backend.beside`."""
        model, recorder = part(self.model), self._recorder
        other = CudaBackend(model, self._config, self._engine, invariant=self._is_invariant, recorder=recorder)
        self._beside.append(other)
        seen_kv = kv.first_layers(model.num_cached_layers, model.num_slot_layers)
        assert isinstance(seen_kv, GraphedKV)
        seen_kv.graphs = None
        other._caches.add(seen_kv)
        return other, seen_kv

    @property
    def compiling(self) -> list[CompileProgress]:
        """Progress of recording graphs, while this backend warms up."""
        return [self._progress] if self._progress else []

    def warm_up(self, *, compile_missing: bool = True) -> None:
        """Compile layers and kernels, and record all graphs (a minute); raise ModelError if even eager passes fail."""
        with PREPARATION.expected():
            for backend in (self, *self._beside):
                backend._warm_up()

    def close(self) -> None:
        """Free the graphs."""
        for kv in [kv for backend in (self, *self._beside) for kv in backend._caches]:
            if kv.graphs is not None:
                kv.graphs.close()
                kv.graphs = None

    def _warm_up(self) -> None:
        new, decoding = [kv for kv in self._caches if kv.graphs is None], shapes(self._engine, self._branches)
        width = table_width(self._engine, self.info.max_model_len)
        if self._config.compile != "off":
            try:
                self._compile()
                for kv in new:
                    recorder = self._recorder or GraphRecorder(self.device)
                    kv.graphs = Graphs(self.model, kv, recorder, decoding, width)
            except (ModelError, RuntimeError, TritonError) as error:
                self._run_uncompiled(error)
            else:
                chains = [chain for plan in self._chains for chain in chain_shapes(self._engine.max_num_seqs, *plan)]
                self._record([*prompt_shapes(decoding), *decoding, *chains], [kv.graphs for kv in new if kv.graphs])
                return
        try:
            self._run_every_kind()
        except (RuntimeError, TritonError) as error:
            raise ModelError(
                f"{self.info.name} cannot be served on {self.device}, where a pass fails: {error}"
            ) from error

    def _run_uncompiled(self, reason: Exception) -> None:
        uncompile_layers(self.model.module)
        self._is_compiled = False
        for kv in self._caches:
            kv.graphs = None
        PREPARATION.counts["eager"] += 1
        logger.warning("%s runs uncompiled; texts may differ from those of compiled passes: %s", self.info.name, reason)

    def _compile(self) -> None:
        """Compile the layers, then the kernels of passes without a graph, by running a pass of each kind."""
        if self._is_compiled:
            return
        started = time.monotonic()
        logger.info("%s: compiling layers", self.info.name)
        compile_layers(self.model.module)
        self._run_every_kind()
        self._is_compiled = True
        logger.info("%s: layers compiled in %.1f s", self.info.name, time.monotonic() - started)

    @torch.inference_mode()
    def _run_every_kind(self) -> None:
        kv = next(iter(self._caches), None) or super().allocate_kv(1, self._engine.block_size)
        for rows in _kinds_of_passes(self._engine, self.info.max_model_len, has_trees=bool(self._branches)):
            batch = build(rows, kv)
            count = range(len(batch.logit_indices))
            keys = noise.keys(count, count, noise.TARGET_STREAM, kv.input_device)
            draws = Draws(torch.ones(len(count), 1), keys, torch.arange(1, 1 + len(count)))
            super().run(batch, draws.to(self.device))
        self.wait()

    def _record(self, every: Sequence[Shape | ChainShape], all_graphs: Sequence[Graphs]) -> None:
        started, steps = time.monotonic(), list(itertools.product(all_graphs, every))
        logger.info("%s: recording %d graphs", self.info.name, len(steps))
        for done, (graphs, shape) in enumerate(steps):
            left_s = (time.monotonic() - started) / max(done, 1) * (len(steps) - done)
            self._progress = CompileProgress(done, len(steps), left_s)
            graphs.record(shape)
        self._progress = None
        logger.info("%s: graphs recorded in %.1f s", self.info.name, time.monotonic() - started)


def make_cuda_backend(
    model: CausalLM, config: ModelConfig, engine: EngineConfig, *, invariant: bool = True, branches: Sequence[int] = ()
) -> EagerBackend:
    """Return a backend for a model on a GPU; see `CudaBackend`."""
    reason = model.why_eager(model.config)
    if model.shard is not None:
        reason = f"it is one of {model.shard.world_size} ranks; execution=vllm computes several with CUDA graphs"
    if reason is None and model.kv_shape.value_dim == 0:
        reason = "its latents are too wide for the kernel that attends"
    if reason is None and model.kv_shape.key_dim > MAX_DIM:
        reason = f"its heads of {model.kv_shape.key_dim} are too wide for the kernel that attends"
    if reason is None:
        backend: EagerBackend = CudaBackend(model, config, engine, invariant=invariant, branches=branches)
    else:
        backend = EagerBackend(model)
        logger.info("%s runs eagerly: %s", model.info.name, reason)
    torch.cuda.empty_cache()  # fusing has left copies of the weights in torch's allocator; KV blocks need that memory
    return backend


def _kinds_of_passes(engine: EngineConfig, max_model_len: int, *, has_trees: bool) -> Iterator[list[ForwardRow]]:
    """Yield rows that use every kernel of passes without a graph; they write to block 0 only."""

    def row(length: int, num_nodes: int = 0) -> ForwardRow:
        blocks = [0] * -(-length // engine.block_size)
        return ForwardRow([0] * length, 0, blocks, 1, range(-1, num_nodes - 1) if num_nodes else None)

    longest = min(engine.max_num_batched_tokens, max_model_len)
    for exponent in range(MAX_SPLIT_LENGTH.bit_length()):  # attention has a kernel for each power of two
        length = min(2**exponent, longest)
        yield [row(length)] * 2
        if has_trees:
            yield from ([row(length, depth)] * 2 for depth in NUM_EXTRA[1:] if depth < length)
    for length in (MAX_SPLIT_LENGTH + 1, MAX_KERNEL_ROWS + 1, longest):
        yield [row(2), row(min(length, longest))]  # a prompt beside a chain


def _parts_on(group: Group, device: torch.device) -> Iterator[Group]:
    """Yield a group's rows on the device: as many as a graph holds, padded so that they use the graphs' kernels."""
    names, extra = ("blocks", "positions", "places", "limits"), group.extra
    tensors = {name: getattr(group, name).to(device, torch.int32, non_blocking=True) for name in names}
    if extra is not None:
        padded = next((count for count in NUM_EXTRA if count >= extra.shape[-1]), extra.shape[-1])
        extra = F.pad(extra.to(torch.int32), (0, padded - extra.shape[-1]), value=-1)
        tensors["extra"] = extra.to(device, non_blocking=True)
    count = max(1, MAX_TOKENS // group.length)
    for first in range(0, group.rows, count):
        rows = {name: tensor[first : first + count] for name, tensor in tensors.items()}
        yield Group(group.start + first * group.length, len(rows["blocks"]), group.length, **rows)


def _with_padding(group: Group) -> Group:
    positions, places, limits = (
        F.pad(tensor, (0, 1), value=filler)
        for tensor, filler in ((group.positions, 0), (group.places, -1), (group.limits, 1))
    )
    return replace(group, length=2, positions=positions, places=places, limits=limits)
