"""CompiledForward: runs a model's forward pass compiled ahead of time by AOTInductor, without overhead per operator.

One package serves every batch, because the numbers of rows, tokens and places are symbolic. A package contains code
only and uses the loaded model's weights.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.errors import PacelineError
from engine.execution.attention import Group, PagedContext, attend_to_gathered
from engine.execution.batch import ForwardBatch, build
from engine.execution.cpu.kernels.paged_attention import attend_to_blocks, suits
from engine.execution.cpu.kernels.panel_linear import packed_copy
from engine.execution.forward_row import ForwardRow
from engine.execution.kv_tensors import KVTensors, stored
from engine.execution.scratch import scratch_folder
from engine.models.causal_lm import forward
from engine.models.layers.layer_attention import AttentionParams
from engine.sampling import noise
from engine.sampling.noise import Draws

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE_LENGTH = 128
"""Prompts are computed in pieces of this many tokens, whose activations fit into the CPU's cache."""
_OPENING = threading.Lock()
"""Held while TMPDIR, a variable of the whole process, names another folder."""
_NOISE_TOLERANCE = 1e-4
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class CompileError(PacelineError):
    """A forward pass cannot be compiled, or the compiled pass's results are wrong."""


@dataclass(slots=True)
class TracedContext(PagedContext):
    """The context of passes while they are traced: one group, without branches on tensor values."""

    _known_ends: dict[bool, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Write, then attend; see `AttentionContext.attend`."""
        (keys, values), (group,) = stored(self.kv, layer), self.groups
        self.write(layer, key, value)
        _, size, kv_heads, _ = keys.shape
        if params.is_plain and key.shape[-1] == value.shape[-1] and suits(query.shape[-1], query.dtype):
            mask, ends = group.mask(params, 1, query, size), self._ends(params)
            return attend_to_blocks(query.transpose(0, 1), keys, values, group.blocks, ends, mask, params.scaling)
        mask = group.mask(params, query.shape[0] // kv_heads, query, size)
        # Indexed by blocks, because with flat indices the compiled code would divide to find each number's block.
        key, value = keys[group.blocks], values[group.blocks]
        return attend_to_gathered(group.rows, group.length, query, key, value, mask, params)

    def _ends(self, params: AttentionParams) -> Tensor:
        """`ends` of `attend_to_blocks`, computed once for all layers with the same `sees_row`."""
        if (ends := self._known_ends.get(params.sees_row)) is None:
            (group,) = self.groups
            ends = group.limits_of(params).contiguous()
            if group.extra is not None:
                ends = torch.cat([ends.unsqueeze(-1), group.extra + 1], -1).amax(-1)
            self._known_ends[params.sees_row] = ends
        return ends


class Step(nn.Module):
    """The compiled module: computes logits and draws tokens, and writes keys and values to the KV cache."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = packed_copy(module)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer, by its name in a package."""
        return dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        places: Tensor,
        limits: Tensor,
        extra: Tensor,
        blocks: Tensor,
        logit_indices: Tensor,
        temperatures: Tensor,
        noise_keys: Tensor,
        noise_rows: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        states: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return [n, vocab] logits at `logit_indices`, [n, vocab] scores and [n] drawn tokens; see `arguments`."""
        rows, length = positions.shape
        group = Group(0, rows, length, blocks, positions, places, limits, extra)
        state = states[0] if states else None
        kv: Any = SimpleNamespace(keys=keys, values=values, states=state, block_size=keys[0].shape[1])
        context = TracedContext(kv, [group])
        logits = forward(self.module, token_ids, positions.flatten(), logit_indices, context).float()
        scores = noise.scores(logits, temperatures, noise_keys, noise_rows)
        return logits, scores, scores.argmax(-1)


def can_run(batch: ForwardBatch) -> bool:
    """Return whether one compiled pass can run a batch: one group of rows no longer than a piece."""
    groups = batch.paged.groups
    return len(groups) == 1 and groups[0].length <= PIECE_LENGTH


def pieces(batch: ForwardBatch) -> Iterator[tuple[ForwardBatch, Tensor]]:
    """Split a batch into passes over one group, or one piece of a prompt; yield each with its logits' [n] indices."""
    for group in batch.paged.groups:
        # Only prompt chunks are longer than a piece, and they are groups of one row.
        for first in range(0, group.length, PIECE_LENGTH):
            last = min(first + PIECE_LENGTH, group.length)
            start, stop = group.start + first, group.start + group.rows * last
            indices = batch.logit_indices
            (where,) = ((indices >= start) & (indices < stop)).nonzero(as_tuple=True)
            paged = PagedContext(batch.paged.kv, [_slice(group, first, last, batch.paged.kv.block_size)])
            yield ForwardBatch(batch.token_ids[start:stop], indices[where] - start, paged), where


def _slice(group: Group, first: int, last: int, block_size: int) -> Group:
    width = int(group.places[:, last - 1].amax()) // block_size + 1 if last < group.length else group.blocks.shape[1]
    return Group(
        start=0,
        rows=group.rows,
        length=last - first,
        blocks=group.blocks[:, :width],
        positions=group.positions[:, first:last],
        places=group.places[:, first:last],
        limits=group.limits[:, first:last],
        extra=None if group.extra is None else group.extra[:, first:last],
    )


def arguments(batch: ForwardBatch, draws: Draws | None = None) -> tuple[list[Tensor], ...]:
    """Return the arguments of `Step.forward`: the batch's tensors, the keys, the values and the states."""
    kv, (group,) = batch.paged.kv, batch.paged.groups
    extra, logit_indices = group.extra, batch.logit_indices
    if extra is None:
        extra = torch.empty((group.rows, group.length, 0), dtype=torch.int64)
    if draws is None:
        no_keys = torch.empty((0, 2), dtype=torch.int32)
        draws = Draws(torch.ones((len(logit_indices), 1)), no_keys, torch.zeros_like(logit_indices))
    tensors = [batch.token_ids, group.positions, group.places, group.limits, extra, group.blocks, logit_indices]
    states = [] if kv.states is None else [kv.states]
    return [*tensors, draws.temperatures, draws.keys, draws.rows], kv.keys, kv.values, states


def _open(path: Path) -> torch._C._aoti.AOTIModelPackageLoader:
    """Load a package without torch's check of the CPU, which starts processes; a package's path names the CPU."""
    run_single_threaded, num_runners, device_index = False, 1, -1
    with _removing_temporary_files():
        return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", run_single_threaded, num_runners, device_index)


@contextlib.contextmanager
def _removing_temporary_files() -> Iterator[None]:
    """Remove the unpacked files at once: the loader does so when it is destroyed, but workers are killed."""
    variable = "TMPDIR"
    with _OPENING, scratch_folder() as folder:
        before = os.environ.get(variable)
        os.environ[variable] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before


class CompiledForward:
    """Runs a loaded package with a loaded model's weights."""

    def __init__(self, path: Path, step: Step) -> None:
        loader = _open(path)
        weights = step.tensors
        # The package keeps pointers into these tensors, so they must stay alive.
        self._step = step
        self._weights = {name: weights[name].detach() for name in loader.get_constant_fqns()}
        use_inactive, check_full_update, user_managed = False, True, True
        loader.load_constants(self._weights, use_inactive, check_full_update, user_managed)
        # `loader.run` parses a description of the arguments in every call, which takes longer than a small layer.
        self._run: Callable[[list[Tensor]], list[Tensor]] = loader.boxed_run

    def __call__(self, batch: ForwardBatch, draws: Draws | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Run a batch that `can_run` accepts, greedily without `draws`; see `Step.forward`."""
        tensors, *caches = arguments(batch, draws)
        # A package assumes contiguous tensors and does not check strides.
        logits, scores, tokens = self._run([*(tensor.contiguous() for tensor in tensors), *itertools.chain(*caches)])
        return logits, scores, tokens

    def in_pieces(self, batch: ForwardBatch) -> Tensor:
        """Run any batch pass by pass; return [n, vocab] logits."""
        results = [(self(piece)[0], where) for piece, where in pieces(batch)]
        logits = torch.empty(len(batch.logit_indices), results[0][0].shape[-1])
        for piece_logits, where in results:
            logits[where] = piece_logits
        return logits

    def check(self, batch: ForwardBatch, expected: Tensor, written: KVTensors) -> None:
        """Raise CompileError if logits, drawn tokens or what is added to the cache differ from an eager pass."""
        count = len(batch.logit_indices)
        keys = noise.keys(range(1, count), range(1, count), noise.TARGET_STREAM, torch.device("cpu"))
        draws = Draws(torch.linspace(0.5, 1.5, count).unsqueeze(-1), keys, torch.arange(count))
        logits, scores, tokens = self(batch, draws)
        drawn = noise.scores(logits, draws.temperatures, draws.keys, draws.rows)
        if not (drawn - scores).abs().amax() < _NOISE_TOLERANCE or not torch.equal(tokens, scores.argmax(-1)):
            raise CompileError("the compiled pass draws tokens that do not follow from its logits and noise")
        caches = zip(written.added, batch.paged.kv.added, strict=True)
        # Padding goes to block 0.
        for eager, compiled in ((expected, logits), *((eager[:, 1:], compiled[:, 1:]) for eager, compiled in caches)):
            difference = float((eager - compiled).abs().amax() / eager.abs().amax().clamp_min(1.0))
            if not difference < _TOLERANCE[batch.paged.kv.keys[0].dtype]:
                raise CompileError(f"the compiled pass differs from the eager one by {difference:.1e}")


def example(kv: KVTensors) -> tuple[ForwardBatch, Draws]:
    """Return two rows of five tokens in three blocks, one row with branches; seven logits and six keys."""
    parents = [-1, 0, 1, 2]
    rows = [ForwardRow([1] * 5, 40, [1, 2, 3], 5, parents), ForwardRow([2] * 5, 36, [4, 5, 6], 2)]
    keys = noise.keys(range(6), range(6), noise.TARGET_STREAM, torch.device("cpu"))
    return build(rows, kv), Draws(torch.full((7, 1), 0.7), keys, torch.arange(7))


def samples() -> list[list[ForwardRow]]:
    """Return batches of the shapes of rounds: a single token, a chain, branches, several rows, a prompt piece."""
    single, chain = ForwardRow([1], 20, [1, 2], 1), ForwardRow([1, 2, 3, 4, 5], 17, [3, 4], 5)
    branching = ForwardRow([1, 2, 3, 4], 9, [5], 4, parents=[-1, -1, 0])
    piece = ForwardRow([i % 8 for i in range(PIECE_LENGTH)], 30, [*range(1, 11)], 3)
    return [
        [single],
        [chain],
        [branching],
        [ForwardRow([i], 0, [1 + i], 1) for i in range(9)],
        [single, chain, branching],
        [piece],
    ]


class GumbelNoise(nn.Module):
    """`noise.gumbel` as a module, for compiling."""

    def forward(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Return [n, vocab] noise."""
        return noise.plain_gumbel(keys, token_ids)


def load_noise(path: Path) -> None:
    """Use a compiled package for `noise.gumbel`; raise CompileError if it differs from `noise.plain_gumbel`."""
    run: Callable[[list[Tensor]], list[Tensor]] = _open(path).boxed_run
    for count, vocab in ((1, 4096), (7, 1000)):
        keys = noise.keys(range(count), range(count), noise.TARGET_STREAM, torch.device("cpu"))
        token_ids = torch.arange(vocab, dtype=torch.int32)
        difference = float((run([keys, token_ids])[0] - noise.plain_gumbel(keys, token_ids)).abs().amax())
        if not difference < _NOISE_TOLERANCE:
            raise CompileError(f"the compiled noise differs from the eager one by {difference:.1e}")
    noise.IMPLEMENTATIONS["cpu"] = lambda keys, token_ids: run([keys, token_ids])[0]
