"""Graphs: records a model's decoding passes as CUDA graphs, one for each shape, and runs batches on them.

Launching an 8B model's kernels one by one takes the host four times as long as the device needs to compute. All shapes
are recorded before serving: every batch of at most `MAX_TOKENS` tokens has a graph, and so has a short prompt, alone or
beside chains, whose tokens fill several rows of a graph. Only long prompts are computed without graphs.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from triton import TritonError  # type: ignore[import-untyped]

from engine.config import EngineConfig
from engine.execution.backend import ChainBatch, PassOutput, RankedTokens
from engine.execution.batch import MAX_GROUPED_LENGTH, ForwardBatch
from engine.execution.cuda.chain_pass import ChainPass, ChainShape, chain_shape
from engine.execution.cuda.kernels.triton_attention import NUM_PARTS
from engine.execution.cuda.static_pass import NUM_EXTRA, ROWS, Outputs, Shape, StaticPass, steps_up_to
from engine.execution.kv_tensors import KVTensors
from engine.models.causal_lm import CausalLM, kv_shape
from engine.sampling.noise import Draws
from engine.stats.preparation import PREPARATION

LENGTHS = (1, 2, 3, 5, 9, 16, 24)
MAX_TOKENS = 1280
"""Most tokens of a graph; a larger batch computes for longer than the launching of its kernels takes."""
_MIN_PROMPT_LENGTH = 5
_MAX_PROMPT_TOKENS = 640
"""Most tokens of a graph for a batch with a prompt, because a graph may pad the batch to twice its rows."""
_GRAPH_BYTES = 10 * 2**20
"""Estimate of the memory of a recorded graph."""

logger = logging.getLogger(__name__)


class GraphRecorder:
    """Records CUDA graphs, which share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # shared: each keeps workspaces

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return a function that does on the device what `compute` does; it may raise OutOfMemoryError."""
        # The first pass compiles kernels, which cannot be done while a graph is recorded.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        self._graphs.append(graph)
        return graph.replay

    def close(self) -> None:
        """Free the graphs, even if tracebacks still hold the functions that replay them."""
        for graph in self._graphs:
            graph.reset()


class Graphs:
    """The graphs of one model with one KV cache."""

    def __init__(
        self, model: CausalLM, kv: KVTensors, recorder: GraphRecorder, shapes: Sequence[Shape], width: int
    ) -> None:
        """Make room for the outputs of `shapes`; `width` is the most blocks of a request's table."""
        self._model = model
        self._kv = kv
        self._recorder = recorder
        self._recorded: dict[Shape | ChainShape, tuple[StaticPass, Callable[[], None]]] = {}
        self._width, self._lengths = width, lengths_of(shapes)
        size = (max(shape.tokens for shape in shapes), model.info.vocab_size)
        self._outputs = Outputs(
            torch.empty(size, device=model.device), torch.empty(size[0], dtype=torch.int64, device=model.device)
        )

    def close(self) -> None:
        """Free the graphs."""
        self._recorded.clear()
        self._recorder.close()

    def run(self, batch: ForwardBatch, draws: Draws | None) -> PassOutput | None:
        """Compute a batch with a graph; None if no graph fits."""
        shape = choose_shape(batch, self._lengths)
        if shape is None or shape not in self._recorded or not self._fits(batch, shape):
            return None
        static, replay = self._recorded[shape]
        static.fill(batch, draws)
        replay()
        return static.output(batch, draws)

    def draw_chain(self, chain: ChainBatch) -> tuple[Tensor, list[RankedTokens]] | None:
        """Draw a chain with a graph; None if no graph fits."""
        shape = chain_shape(chain)
        if shape is None or shape not in self._recorded or not self._fits(chain.first, shape.first):
            return None
        static, replay = self._recorded[shape]
        assert isinstance(static, ChainPass)
        static.fill_chain(chain)
        replay()
        return static.drawn(chain)

    def _fits(self, batch: ForwardBatch, shape: Shape) -> bool:
        """Return whether a shape fits a batch's tables and logits, without splitting rows that tokens see whole."""
        groups = batch.paged.groups
        sees_row = self._model.is_part and self._model.drafts_blocks
        is_cut = any(group.length > shape.length for group in groups)
        width, count = max(group.blocks.shape[1] for group in groups), len(batch.logit_indices)
        # A block head's pass without logits absorbs, and graphs draw.
        return width <= self._width and count <= len(self._outputs.tokens) and not (sees_row and (is_cut or not count))

    @torch.inference_mode()
    def record(self, shape: Shape | ChainShape) -> None:
        """Record a pass or chain; if that fails, this shape has no graph."""
        inputs = self._model, self._kv, self._width
        try:
            static = (
                ChainPass(*inputs, shape, self._outputs)
                if isinstance(shape, ChainShape)
                else StaticPass(*inputs, shape, self._outputs)
            )
            self._recorded[shape] = static, self._recorder.record(static.compute)
        except (RuntimeError, TritonError) as error:  # most likely, the memory is full
            PREPARATION.counts["not_recorded"] += 1
            logger.warning("%s: no graph of %s could be recorded: %s", self._model.info.name, shape, error)


def shapes(engine: EngineConfig, branches: Sequence[int] = ()) -> list[Shape]:
    """Return the shapes of a configuration's decoding passes, the largest first, so that others reuse its memory.

    `branches` are the numbers of possible tokens of a request in passes over trees and branches.
    """
    k = engine.num_speculative_tokens
    # `build` cuts long drafts into more rows than there are requests.
    rows = steps_up_to(engine.max_num_seqs, ROWS) if 1 + k <= MAX_GROUPED_LENGTH else ROWS
    sizes = set(itertools.product(rows, steps_up_to(max(1 + k, _MIN_PROMPT_LENGTH), LENGTHS), [0]))
    padded = {steps_up_to(count, LENGTHS)[-1] for count in branches}
    sizes |= set(itertools.product(rows, padded, steps_up_to(k, NUM_EXTRA)[1:]))
    every = {Shape(count, _at_least_two_tokens(count, length), num_extra) for count, length, num_extra in sizes}
    return sorted((shape for shape in every if shape.tokens <= MAX_TOKENS), key=lambda shape: -shape.tokens)


def prompt_shapes(decoding: Sequence[Shape]) -> list[Shape]:
    """Return the shapes of passes over short prompts that are larger than the decoding passes beside them."""
    sizes = {(lengths_of(decoding)[shape.num_extra > 0][-1], shape.num_extra) for shape in decoding}
    larger = {Shape(rows, *size) for size in sizes for rows in ROWS if rows * size[0] <= _MAX_PROMPT_TOKENS}
    return sorted(larger.difference(decoding), key=lambda shape: -shape.tokens)


def lengths_of(decoding: Sequence[Shape]) -> dict[bool, list[int]]:
    """Return the lengths of passes over chains (False), and of passes over trees and branches (True), ascending."""
    return {
        is_tree: sorted({shape.length for shape in decoding if bool(shape.num_extra) == is_tree})
        for is_tree in (False, True)
    }


def table_width(engine: EngineConfig, max_model_len: int) -> int:
    """Return the number of blocks of the longest context's table, with its draft and branches."""
    longest = min(max_model_len, engine.max_model_len or max_model_len) + 32 * (1 + engine.num_speculative_tokens)
    return min(-(-longest // engine.block_size), engine.num_blocks or longest)


def graph_bytes(engine: EngineConfig, config: PreTrainedConfig, max_model_len: int, *, num_models: int = 1) -> int:
    """Estimate the memory of graphs."""
    recorded = shapes(engine, LENGTHS)  # an upper bound: as if every model had trees, or ran ahead
    text, value_dim = config.get_text_config(), kv_shape(config, 1).value_dim
    num_parts = recorded[0].tokens * NUM_PARTS * text.num_attention_heads
    num_outputs = recorded[0].tokens * text.vocab_size
    num_blocks = sum(shape.rows for shape in recorded) * table_width(engine, max_model_len)
    num_bytes = torch.float32.itemsize * int(num_parts * (value_dim + 2) + num_outputs + num_blocks)
    if engine.self_draft_layers is not None:
        num_models += 1  # a target's first layers have graphs, too
    return num_models * (num_bytes + len(recorded) * _GRAPH_BYTES)


def choose_shape(batch: ForwardBatch, lengths: Mapping[bool, Sequence[int]]) -> Shape | None:
    """Return the smallest shape that holds a batch, or None; a row longer than all `lengths` takes several rows."""
    groups = batch.paged.groups
    most_extra = max((0 if group.extra is None else group.extra.shape[-1] for group in groups), default=0)
    longest = max((group.length for group in groups), default=0)
    if not groups or not (possible := lengths[most_extra > 0]):
        return None
    length = next((step for step in possible if step >= longest), possible[-1])
    num_rows = sum(group.rows * -(-group.length // length) for group in groups)
    rows = next((step for step in ROWS if step >= num_rows), None)
    num_extra = next((step for step in NUM_EXTRA if step >= most_extra), None)
    if rows is None or num_extra is None:
        return None
    shape = Shape(rows, _at_least_two_tokens(rows, length), num_extra)
    return shape if shape.tokens <= (MAX_TOKENS if longest <= length else _MAX_PROMPT_TOKENS) else None


def _at_least_two_tokens(rows: int, length: int) -> int:
    """Return the length of the rows: a layer compiled for a single token could round differently."""
    return 2 if rows * length == 1 else length
