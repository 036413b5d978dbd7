"""Graphs: records a model's decoding passes as CUDA graphs, one for each shape, and runs batches on them.

A graph launches a whole pass at once; one by one, an 8B model's kernels take the host four times as long to launch as
the device to compute. The shapes of a configuration are recorded before it serves. A pass of any other shape runs
without a graph; where there is one rank, its shape is recorded when no request waits.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from triton import TritonError  # type: ignore[import-untyped]

from engine.config import EngineConfig
from engine.control.stats import PREPARATION
from engine.execution.backend import ChainBatch, PassOutput, RankedTokens
from engine.execution.batch import ForwardBatch
from engine.execution.cuda.chain_pass import ChainPass, ChainShape, chain_shape
from engine.execution.cuda.kernels.triton_attention import CHUNK
from engine.execution.cuda.static_pass import Outputs, Shape, StaticPass
from engine.execution.kv_tensors import KVTensors
from engine.models.causal_lm import CausalLM, kv_shape
from engine.models.layers.reducer import alone
from engine.sampling.noise import Draws

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (1, 2, 3, 5, 9, 16, 24)
NUM_EXTRA = (0, 4, 8, 16)
CONTEXTS = (8192, 32_768, 131_072)
"""Tokens of block tables; the largest table has the length of the longest context instead."""
MAX_TOKENS = 1280
"""Tokens of a graph, at most; a larger batch computes long enough for its kernels to be launched meanwhile."""
_MAX_BRANCH_TOKENS = 320
"""The same for trees and branches, and what outputs have room for at least."""
_MAX_PARTIAL_TOKENS = MAX_TOKENS * CONTEXTS[0] * 5 // 4
"""Tokens of a pass times the places of its block tables, at most: attention keeps a result for each chunk of them."""
_GRAPH_BYTES = 10 * 2**20
_COMMUNICATION_BYTES = 2**30
"""Estimates: the memory of a recorded graph, and that of NCCL and symmetric buffers."""

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records computations, so that each can be launched at once."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return a function that does on the device what `compute` does; it may raise OutOfMemoryError."""
        ...

    def close(self) -> None:
        """Free all recordings, though somebody may still hold the functions that replay them."""
        ...


class GraphRecorder:
    """Records CUDA graphs, which share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # one, because each keeps workspaces

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return the replay of a graph; see `Recorder.record`."""
        # The first pass compiles kernels, which cannot be done while a graph is recorded.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), alone():
            compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        self._graphs.append(graph)
        return graph.replay

    def close(self) -> None:
        """Free the graphs: the traceback of an error holds the one that was replayed."""
        for graph in self._graphs:
            graph.reset()


class Graphs:
    """The graphs of one model with one KV cache."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVTensors,
        recorder: Recorder,
        shapes: Sequence[Shape],
        agree: Callable[[bool], bool] = lambda ok: ok,
    ) -> None:
        """Make room for the outputs of these shapes; `agree` tells whether all ranks of the model say True."""
        self._model = model
        self._kv = kv
        self._recorder = recorder
        self._agree = agree
        self._recorded: dict[Shape | ChainShape, tuple[StaticPass, Callable[[], None]]] = {}
        self._impossible: set[Shape | ChainShape] = set()
        self._wanted: set[Shape | ChainShape] = set()
        self._widths = sorted({shape.width for shape in shapes})
        self._max_tokens = max(_MAX_BRANCH_TOKENS, *(shape.tokens for shape in shapes))
        size = (self._max_tokens, len(model.vocab_slice))
        self._outputs = Outputs(
            torch.empty(size, device=model.device),
            torch.empty(self._max_tokens, dtype=torch.int64, device=model.device),
        )

    def close(self) -> None:
        """Free the graphs."""
        self._recorded.clear()
        self._recorder.close()

    def run(self, batch: ForwardBatch, draws: Draws | None) -> PassOutput | None:
        """Compute a batch with a graph; None if it has none, or exceeds the largest."""
        shape = choose_shape(batch, self._widths, self._max_tokens)
        if shape not in self._recorded:
            if shape is not None:
                self._wanted.add(shape)
            return None
        static, replay = self._recorded[shape]
        static.fill(batch, draws)
        replay()
        return static.output(batch, draws)

    def draw_chain(self, chain: ChainBatch) -> tuple[Tensor, list[RankedTokens]] | None:
        """Draw a chain with a graph; None if it has none, or exceeds the largest."""
        shape = chain_shape(chain, choose_shape(chain.first, self._widths, self._max_tokens))
        if shape not in self._recorded:
            if shape is not None and _fits(shape.first, self._kv.block_size):
                self._wanted.add(shape)
            return None
        static, replay = self._recorded[shape]
        assert isinstance(static, ChainPass)
        static.fill_chain(chain)
        replay()
        return static.drawn(chain)

    def record_wanted(self) -> bool:
        """Record one of the shapes that passes have had without a graph; return whether there are more."""
        self._wanted -= self._impossible
        if self._wanted:
            self.record(self._wanted.pop())
        return bool(self._wanted)

    @torch.inference_mode()
    def record(self, shape: Shape | ChainShape) -> None:
        """Record a pass or chain of a shape; if a rank cannot, those of this shape run without a graph on all ranks."""
        PREPARATION.observe("recorded")
        try:
            inputs = self._model, self._kv
            static = (
                ChainPass(*inputs, shape, self._outputs)
                if isinstance(shape, ChainShape)
                else StaticPass(*inputs, shape, self._outputs)
            )
            recorded = static, self._recorder.record(static.compute)
        except (RuntimeError, TritonError) as error:  # most likely, the memory is full
            recorded = None
            logger.warning("%s: no graph of %s could be recorded: %s", self._model.info.name, shape, error)
        if self._agree(recorded is not None) and recorded is not None:
            self._recorded[shape] = recorded
        else:
            self._impossible.add(shape)
            PREPARATION.counts["not_recorded"] += 1


def shapes(engine: EngineConfig, max_model_len: int, block_size: int, branches: Sequence[int] = ()) -> list[Shape]:
    """Return the shapes of a configuration's decoding passes, the largest first: later ones fit into its memory.

    Args:
        max_model_len: the model's context length.
        branches: the possible tokens of a request in passes over trees and branches.
    """
    k = engine.num_speculative_tokens
    max_rows = engine.max_num_seqs * -(-(1 + k) // LENGTHS[-1])  # a long draft goes on in further rows
    lengths, rows = _up_to(1 + k, LENGTHS), _up_to(max_rows, ROWS)
    sizes = {(*size, 0) for size in itertools.product(rows, lengths)}
    sizes |= {(*size, 0) for size in itertools.product(_up_to(4, rows), _up_to(16, LENGTHS))}  # ends of prompts
    padded = {_up_to(count, LENGTHS)[-1] for count in branches}
    sizes |= set(itertools.product(_up_to(engine.max_num_seqs, ROWS), padded, _up_to(k, NUM_EXTRA)[1:]))
    widths = _widths(engine, max_model_len, block_size)
    every = {
        Shape(rows, _at_least_two_tokens(rows, length), num_extra, width)
        for (rows, length, num_extra), width in itertools.product(sizes, widths)
    }
    return sorted((shape for shape in every if _fits(shape, block_size)), key=lambda shape: -shape.tokens * shape.width)


def graph_bytes(
    engine: EngineConfig, config: PreTrainedConfig, max_model_len: int, world_size: int, *, has_head: bool = False
) -> int:
    """Return an estimate of the memory that a rank's graphs and its communication with other ranks take."""
    recorded = shapes(engine, max_model_len, engine.block_size)
    text, value_dim = config.get_text_config(), kv_shape(config, world_size).value_dim
    tokens = max(_MAX_BRANCH_TOKENS, *(shape.tokens for shape in recorded))
    chunks = max(shape.tokens * -(-shape.width * engine.block_size // CHUNK) for shape in recorded)
    partial_bytes = chunks * text.num_attention_heads // world_size * (value_dim + 2) * torch.float32.itemsize
    output_bytes = tokens * text.vocab_size * torch.float32.itemsize
    communication_bytes = _COMMUNICATION_BYTES if world_size > 1 else 0
    # A target's head or first layers have graphs of their own.
    num_models = 2 if has_head or engine.self_draft_layers is not None else 1
    return num_models * (int(partial_bytes + output_bytes) + len(recorded) * _GRAPH_BYTES) + communication_bytes


def choose_shape(batch: ForwardBatch, widths: Sequence[int], max_tokens: int = MAX_TOKENS) -> Shape | None:
    """Return the smallest shape that holds a batch, or None; `widths` are those of block tables, ascending."""
    if len(batch.paged.groups) != 1:
        return None
    (group,) = batch.paged.groups
    num_extra = 0 if group.extra is None else group.extra.shape[-1]
    sizes, ladders = (group.rows, group.length, num_extra, group.blocks.shape[1]), (ROWS, LENGTHS, NUM_EXTRA, widths)
    fitting = [[step for step in ladder if step >= size] for size, ladder in zip(sizes, ladders, strict=True)]
    if not all(fitting):
        return None
    rows, length, num_extra, width = (steps[0] for steps in fitting)
    shape = Shape(rows, _at_least_two_tokens(rows, length), num_extra, width)
    return shape if shape.tokens <= max_tokens and _fits(shape, batch.paged.kv.block_size) else None


def _up_to(size: int, ladder: Sequence[int]) -> list[int]:
    """Return the steps of a ladder up to the first that is at least `size`."""
    return [step for step, last in zip(ladder, (0, *ladder), strict=False) if last < size or step == ladder[0]]


def _widths(engine: EngineConfig, max_model_len: int, block_size: int) -> list[int]:
    """Return the widths of block tables, the last for the longest context with its draft and branches."""
    longest = min(max_model_len, engine.max_model_len or max_model_len) + 32 * (1 + engine.num_speculative_tokens)
    last = min(-(-longest // block_size), engine.num_blocks or longest)
    return [*(tokens // block_size for tokens in CONTEXTS if tokens < 0.8 * last * block_size), last]


def _at_least_two_tokens(rows: int, length: int) -> int:
    """Return the length of rows of a shape: a layer compiled for one token alone could round differently."""
    return 2 if rows * length == 1 else length


def _fits(shape: Shape, block_size: int) -> bool:
    max_tokens = _MAX_BRANCH_TOKENS if shape.num_extra else MAX_TOKENS
    return shape.tokens <= max_tokens and shape.tokens * shape.width * block_size <= _MAX_PARTIAL_TOKENS
