"""Graphs: records a model's decoding passes as CUDA graphs, one for each shape, and runs batches on them.

A graph launches a whole pass at once; one by one, an 8B model's kernels take the host four times as long to launch as
the device to compute.
"""

import itertools
import logging
import time
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.execution.attention import KVTensors
from engine.execution.backend import ChainBatch, PassOutput, RankedTokens
from engine.execution.batch import ForwardBatch
from engine.execution.cuda.chain_pass import ChainPass, ChainShape, chain_shape
from engine.execution.cuda.static_pass import Outputs, Shape, StaticPass
from engine.models.causal_lm import CausalLM
from engine.sampling.noise import Draws

ROWS = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (1, 2, 3, 5, 9, 16, 24)
NUM_EXTRA = (0, 4, 8, 16)
SHORT_CONTEXT = 8192
"""Tokens of the smaller of two block tables."""
MAX_TOKENS = 320
"""Tokens of a graph, at most; a larger batch computes long enough for its kernels to be launched meanwhile."""
_RECORDED = [
    *itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 3, 5)),
    *itertools.product((1, 2, 4), (9, 16)),  # the uncached end of a prompt
]
"""Rows and lengths of the graphs that are recorded in advance."""
_MAX_PARTIAL_TOKENS = 1 << 22
"""Tokens of a pass times the places of its block tables, at most: attention keeps a result for each chunk of them."""

logger = logging.getLogger(__name__)


class Graphs:
    """The graphs of one model with one KV cache. The common shapes are recorded in advance, others when they come."""

    def __init__(self, model: CausalLM, kv: KVTensors) -> None:
        self._model = model
        self._kv = kv
        self._recorded: dict[Shape, tuple[StaticPass, torch.cuda.CUDAGraph]] = {}
        self._chains: dict[ChainShape, tuple[ChainPass, torch.cuda.CUDAGraph]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        num_blocks = kv.keys[0].shape[0]
        longest = min(-(-model.info.max_model_len // kv.block_size) + 1, num_blocks)
        self._widths = sorted({min(SHORT_CONTEXT // kv.block_size, longest), longest})
        size = (MAX_TOKENS, model.info.vocab_size)
        self._outputs = Outputs(
            torch.empty(size, device=model.device), torch.empty(MAX_TOKENS, dtype=torch.int64, device=model.device)
        )

    def record(self) -> None:
        """Record the common shapes, the largest first, so that the others fit into its memory."""
        started = time.monotonic()
        for rows, length in sorted(_RECORDED, reverse=True):
            shape = Shape(rows, _at_least_two_tokens(rows, length), 0, self._widths[0])
            if shape not in self._recorded and _fits(shape, self._kv.block_size):
                self._record(shape)
        text = "%s: %d graphs recorded in %.1f s"
        logger.info(text, self._model.info.name, len(self._recorded), time.monotonic() - started)

    def run(self, batch: ForwardBatch, draws: Draws | None) -> PassOutput | None:
        """Compute a batch with a graph; None if it exceeds the largest graph."""
        shape = choose_shape(batch, self._widths)
        if shape is None:
            return None
        if shape not in self._recorded:
            self._record(shape)
        static, graph = self._recorded[shape]
        static.fill(batch, draws)
        graph.replay()
        return static.output(batch, draws)

    def draw_chain(self, chain: ChainBatch) -> tuple[Tensor, list[RankedTokens]] | None:
        """Draw a chain with a graph; None if it exceeds the largest graph."""
        shape = chain_shape(chain, choose_shape(chain.first, self._widths))
        if shape is None or not _fits(shape.first, self._kv.block_size):
            return None
        if shape not in self._chains:
            static = ChainPass(self._model, self._kv, shape, self._outputs)
            self._chains[shape] = static, self._capture(static)
        static, graph = self._chains[shape]
        static.fill_chain(chain)
        graph.replay()
        return static.drawn(len(chain.lengths))

    def _record(self, shape: Shape) -> None:
        static = StaticPass(self._model, self._kv, shape, self._outputs)
        self._recorded[shape] = static, self._capture(static)

    @torch.inference_mode()
    def _capture(self, static: StaticPass) -> torch.cuda.CUDAGraph:
        # The first pass compiles kernels, which cannot be done while a graph is recorded.
        stream = torch.cuda.Stream(self._model.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(stream):
            static.compute()
        torch.cuda.current_stream(self._model.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            static.compute()
        return graph


def choose_shape(batch: ForwardBatch, widths: Sequence[int]) -> Shape | None:
    """Return the smallest shape that holds a batch, or None; `widths` are those of block tables, ascending."""
    if len(batch.paged.groups) != 1:
        return None
    (group,) = batch.paged.groups
    num_extra = 0 if group.extra is None else group.extra.shape[-1]
    sizes = [group.rows, group.length, num_extra, group.blocks.shape[1]]
    steps = [ROWS, LENGTHS, NUM_EXTRA, widths]
    places = [bisect_left(choices, size) for choices, size in zip(steps, sizes, strict=True)]
    if any(place == len(choices) for choices, place in zip(steps, places, strict=True)):
        return None
    rows, length, num_extra, width = (choices[place] for choices, place in zip(steps, places, strict=True))
    shape = Shape(rows, _at_least_two_tokens(rows, length), num_extra, width)
    return shape if _fits(shape, batch.paged.kv.block_size) else None


def _at_least_two_tokens(rows: int, length: int) -> int:
    """Return the length of rows of a shape: a layer compiled for one token alone could round differently."""
    return 2 if rows * length == 1 else length


def _fits(shape: Shape, block_size: int) -> bool:
    return shape.tokens <= MAX_TOKENS and shape.tokens * shape.width * block_size <= _MAX_PARTIAL_TOKENS
