"""CudaBackend: compiled layers and CUDA graphs, made so that a token has the same bits in every batch.

In 16-bit formats two tokens can have almost equal scores, and a text would depend on how a pass rounds. So nothing here
is to round by the batch: attention splits a context in one way, matrix products never split their inner dimension, and
layers are compiled once for every number of tokens.
"""

import logging
import time
import weakref
from collections.abc import Collection

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.execution.attention import Group, KVShape, KVTensors
from engine.execution.backend import PassOutput
from engine.execution.batch import ForwardBatch, ForwardRow, build
from engine.execution.cuda import noise_kernel
from engine.execution.cuda.compiled import TritonContext, compile_layers, uncompile_layers
from engine.execution.cuda.graphs import Graphs
from engine.execution.cuda.linear import make_invariant
from engine.execution.eager import EagerBackend, log_loaded
from engine.models.causal_lm import CausalLM, Shard, forward
from engine.models.loader import load_model
from engine.models.sub_layers import thin
from engine.sampling import noise
from engine.sampling.noise import Draws

logger = logging.getLogger(__name__)


class GraphedKV(KVTensors):
    """A KV cache with the graphs that work on it; batches for it are made on the host.

    Attributes:
        graphs: None until the backend is warmed up.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, like: Tensor) -> None:
        super().__init__(shape, num_blocks, block_size, like)
        self.input_device = torch.device("cpu")
        self.graphs: Graphs | None = None


class CudaBackend(EagerBackend):
    """Runs a model on a GPU: with Triton attention at first, compiled and as graphs once it is warmed up."""

    def __init__(self, model: CausalLM, config: ModelConfig) -> None:
        """Choose how matrix products and noise are computed in this process.

        Raises:
            ModelError: see `EagerBackend`.
        """
        if model.dtype != torch.float32:
            make_invariant(model.module, model.dtype)
        noise.implement("cuda", noise_kernel.gumbel)
        self._config = config
        self._caches: weakref.WeakSet[GraphedKV] = weakref.WeakSet()
        self._is_compiled = False
        self._thinned: list[CudaBackend] = []
        super().__init__(model)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Launch a pass; see `Backend.run`."""
        kv = batch.paged.kv
        assert isinstance(kv, GraphedKV)
        if kv.graphs is not None and (output := kv.graphs.run(batch, draws)) is not None:
            return output
        logits = self.logits(batch)
        scores = logits if draws is None else noise.noised_logits(logits, _draws_on(draws, self.device))
        return PassOutput(logits, scores, scores.argmax(-1))

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

    def thin(self, skipped: Collection[str], kv: KVTensors) -> "tuple[CudaBackend, KVTensors]":
        """Return this model without some of its sub-layers; see `Backend.thin`."""
        model, layers = thin(self.model, skipped)
        thinned = CudaBackend(model, self._config)
        self._thinned.append(thinned)
        seen_kv = kv.of_layers(layers)
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
        """Compile the layers by computing one pass."""
        started = time.monotonic()
        compile_layers(self.model.module)
        self._is_compiled = True
        with torch.inference_mode():
            self.logits(build([ForwardRow([0, 0], 0, [1], 1)], super().allocate_kv(2, 16)))
        logger.info("%s: layers compiled in %.1f s", self.info.name, time.monotonic() - started)


def load_cuda(config: ModelConfig, device: torch.device, dtype: torch.dtype, shard: Shard | None) -> EagerBackend:
    """Load a model for a GPU; an encoder-decoder runs eagerly.

    Raises:
        ModelError: the model cannot be served.
    """
    started = time.monotonic()
    model = load_model(config, device=device, dtype=dtype, shard=shard)
    if model.info.decoder_start_id is None:
        backend: EagerBackend = CudaBackend(model, config)
    else:
        backend = EagerBackend(model)
        logger.info("%s runs eagerly: it is an encoder-decoder", model.info.name)
    torch.cuda.empty_cache()  # fusing has left copies of the weights in torch's allocator; KV blocks need that memory
    log_loaded(backend, time.monotonic() - started)
    return backend


def _group_on(group: Group, device: torch.device) -> Group:
    """Return a group with its tensors on a device."""
    tensors = (group.blocks, group.positions, group.places, group.limits)
    blocks, positions, places, limits = (tensor.to(device, non_blocking=True) for tensor in tensors)
    extra = None if group.extra is None else group.extra.to(device, non_blocking=True)
    return Group(group.start, group.rows, group.length, blocks, positions, places, limits, extra)


def _draws_on(draws: Draws, device: torch.device) -> Draws:
    tensors = (draws.temperatures, draws.keys, draws.rows)
    return Draws(*(tensor.to(device, non_blocking=True) for tensor in tensors))
