"""CudaBackend: compiled layers and CUDA graphs, made so that a token has the same bits in every batch.

In 16-bit formats two tokens can have almost equal scores, so rounding could change a text. So rounding must not depend
on the batch: attention splits a context in one way, matrix products never split their inner dimension, and layers are
compiled once for every number of tokens.
"""

import logging
import time
import weakref

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.execution.attention import Group, KVTensors
from engine.execution.backend import ChainBatch, PassOutput, RankedTokens
from engine.execution.batch import ForwardBatch, ForwardRow, build
from engine.execution.cuda.compiled_layers import TritonContext, compile_layers, uncompile_layers
from engine.execution.cuda.graphs import Graphs
from engine.execution.cuda.kernels import draw_kernel
from engine.execution.cuda.linear import make_invariant
from engine.execution.eager import EagerBackend
from engine.models.causal_lm import CausalLM, forward
from engine.models.first_layers import first_layers
from engine.models.layer_attention import KVShape
from engine.sampling import noise
from engine.sampling.noise import Draws

logger = logging.getLogger(__name__)


class GraphedKV(KVTensors):
    """A KV cache and its graphs, None until the backend is warmed up; batches for it are made on the host."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, like: Tensor) -> None:
        super().__init__(shape, num_blocks, block_size, like)
        self.input_device = torch.device("cpu")
        self.graphs: Graphs | None = None


class CudaBackend(EagerBackend):
    """Runs a model on a GPU: with Triton attention at first, compiled and as graphs once it is warmed up."""

    def __init__(self, model: CausalLM, config: ModelConfig, *, invariant: bool = True) -> None:
        """Choose how products and noise are computed in this process; without `invariant` ones, bits may differ."""
        if invariant and model.dtype != torch.float32:
            make_invariant(model.module, model.dtype)
        noise.IMPLEMENTATIONS["cuda"] = draw_kernel.gumbel
        self._config = config
        self._caches: weakref.WeakSet[GraphedKV] = weakref.WeakSet()
        self._is_compiled = False
        self._thinned: list[CudaBackend] = []
        super().__init__(model)
        self.draws_chains = config.compile != "off"

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Launch a pass; see `Backend.run`."""
        kv = batch.paged.kv
        assert isinstance(kv, GraphedKV)
        if kv.graphs is not None and (output := kv.graphs.run(batch, draws)) is not None:
            return output
        return super().run(batch, draws and _draws_on(draws, self.device))

    @torch.inference_mode()
    def draw_chain(self, chain: ChainBatch) -> tuple[Tensor, list[RankedTokens]] | None:
        """Launch a graph; see `Backend.draw_chain`."""
        kv = chain.first.paged.kv
        assert isinstance(kv, GraphedKV)
        return None if kv.graphs is None else kv.graphs.draw_chain(chain)

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Compute [n, vocab] float32 logits."""
        groups = [_group_on(group, self.device) for group in batch.paged.groups]
        token_ids, indices = (
            tensor.to(self.device, non_blocking=True) for tensor in (batch.token_ids, batch.logit_indices)
        )
        positions = torch.cat([group.positions.flatten() for group in groups])
        with TritonContext(batch.paged.kv, groups, layers=batch.paged.layers).current() as context:
            return forward(self.model.module, token_ids, positions, indices, context).float()

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVTensors:
        """Allocate a KV cache for this model."""
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        kv = GraphedKV(self.model.kv_shape, num_blocks, block_size, like)
        self._caches.add(kv)
        return kv

    def thin(self, num_layers: int, kv: KVTensors) -> "tuple[CudaBackend, KVTensors]":
        """Return this model's first layers; see `Backend.thin`."""
        thinned = CudaBackend(first_layers(self.model, num_layers), self._config)
        self._thinned.append(thinned)
        seen_kv = kv.first_layers(num_layers)
        assert isinstance(seen_kv, GraphedKV)
        seen_kv.graphs = None
        thinned._caches.add(seen_kv)
        return thinned, seen_kv

    def warm_up(self, *, compile_missing: bool = True) -> None:
        """Compile the layers and record the graphs of all KV caches; this takes up to a minute."""
        self._warm_up()
        for thinned in self._thinned:
            thinned.warm_up(compile_missing=compile_missing)

    def _warm_up(self) -> None:
        if self._config.compile == "off":
            return
        if (shard := self.model.shard) is not None and shard.world_size > 1:
            logger.info("%s runs eagerly: it is one of several ranks", self.info.name)
            return
        try:
            if not self._is_compiled:
                self._compile()
            for kv in self._caches:
                if kv.graphs is None:
                    graphs = Graphs(self.model, kv)
                    graphs.record()
                    kv.graphs = graphs
        except (ModelError, RuntimeError) as error:
            uncompile_layers(self.model.module)
            self._is_compiled = False
            for kv in self._caches:
                kv.graphs = None
            logger.warning("%s runs eagerly: %s", self.info.name, error)

    def _compile(self) -> None:
        started = time.monotonic()
        compile_layers(self.model.module)
        self._is_compiled = True
        with torch.inference_mode():
            self.logits(build([ForwardRow([0, 0], 0, [1], 1)], super().allocate_kv(2, 16)))
        logger.info("%s: layers compiled in %.1f s", self.info.name, time.monotonic() - started)


def make_cuda_backend(model: CausalLM, config: ModelConfig, *, invariant: bool = True) -> EagerBackend:
    """Return a backend for a model on a GPU."""
    if model.runs_eagerly is None:
        backend: EagerBackend = CudaBackend(model, config, invariant=invariant)
    else:
        backend = EagerBackend(model)
        logger.info("%s runs eagerly: %s", model.info.name, model.runs_eagerly)
    torch.cuda.empty_cache()  # fusing has left copies of the weights in torch's allocator; KV blocks need that memory
    return backend


def _group_on(group: Group, device: torch.device) -> Group:
    tensors = (group.blocks, group.positions, group.places, group.limits)
    blocks, positions, places, limits = (tensor.to(device, non_blocking=True) for tensor in tensors)
    extra = None if group.extra is None else group.extra.to(device, non_blocking=True)
    return Group(group.start, group.rows, group.length, blocks, positions, places, limits, extra)


def _draws_on(draws: Draws, device: torch.device) -> Draws:
    tensors = (draws.temperatures, draws.keys, draws.rows)
    return Draws(*(tensor.to(device, non_blocking=True) for tensor in tensors))
