"""CompiledForward: a model's forward pass, compiled ahead of time, so that a pass costs its arithmetic.

A small model on a CPU is bound by what calling an operator costs: most of an eager pass is spent between the products.
AOTInductor turns the pass into one call. One package serves every batch, because rows, tokens and context are symbolic.
It holds code only; the weights stay the loaded model's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.errors import PacelineError
from engine.execution.attention import Group, KVTensors, PagedContext, additive_mask, slots_of
from engine.execution.batch import ForwardBatch, ForwardRow, build
from engine.execution.cpu.half_weights import packed_copy
from engine.execution.cpu.traced import TracedContext
from engine.models.causal_lm import forward
from engine.sampling import noise
from engine.sampling.noise import Draws

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE_LENGTH = 128
"""Prompts are computed in pieces of so many tokens: all that a layer holds of them stays in the cache."""
_NOISE_TOLERANCE = 1e-4
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class CompileError(PacelineError):
    """A model's forward pass cannot be compiled, or computes something else when it is."""


class Step(nn.Module):
    """What is compiled: tokens and where they stand in, logits out; keys and values are written on the way."""

    def __init__(self, module: nn.Module, windows: list[int | None]) -> None:
        super().__init__()
        self.module = packed_copy(module)
        self.windows = windows

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every weight by its name in a package."""
        return dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        places: Tensor,
        limits: Tensor,
        extra: Tensor,
        blocks: Tensor,
        wanted: Tensor,
        temperatures: Tensor,
        noise_keys: Tensor,
        noise_rows: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute [n, vocab] logits at `wanted`, scores, and [n] tokens drawn; `arguments` returns the arguments."""
        size = keys[0].shape[1]
        masks = {
            window: additive_mask(blocks.shape[1] * size, positions, limits, extra, window, keys[0].dtype)
            for window in self.windows
        }
        ends = torch.cat([limits.unsqueeze(-1), extra + 1], -1).amax(-1)
        context = TracedContext(keys, values, slots_of(blocks, places, size).flatten(), blocks, ends, masks)
        logits = forward(self.module, token_ids, positions.flatten(), wanted, context).float()
        scores = noise.scores(logits, temperatures, noise_keys, noise_rows)
        return logits, scores, scores.argmax(-1)


def can_run(batch: ForwardBatch) -> bool:
    """Return whether one compiled pass computes a batch: one group of short rows."""
    groups = batch.paged.groups
    return len(groups) == 1 and groups[0].length <= PIECE_LENGTH


def pieces(batch: ForwardBatch) -> Iterator[tuple[ForwardBatch, Tensor]]:
    """Cut a batch into compiled passes, each of one group, or of a part of a long one that reads what came before it.

    Yields:
        A pass, and which of the batch's logits it computes: [n] indices of `logit_indices`.
    """
    for group in batch.paged.groups:
        # Only a prompt, which is a group of one row, is longer than a piece.
        for first in range(0, group.length, PIECE_LENGTH):
            last = min(first + PIECE_LENGTH, group.length)
            start, stop = group.start + first, group.start + group.rows * last
            wanted = batch.logit_indices
            (where,) = ((wanted >= start) & (wanted < stop)).nonzero(as_tuple=True)
            part = PagedContext(batch.paged.kv, [_part(group, first, last, batch.paged.kv.block_size)])
            yield ForwardBatch(batch.token_ids[start:stop], wanted[where] - start, part), where


def _part(group: Group, first: int, last: int, block_size: int) -> Group:
    """Return the tokens from `first` to `last` of every row, and the blocks that they see."""
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


def arguments(batch: ForwardBatch, draws: Draws | None = None) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return what `Step.forward` takes: the batch's own tensors, the keys and the values."""
    kv, (group,) = batch.paged.kv, batch.paged.groups
    extra, wanted = group.extra, batch.logit_indices
    if extra is None:
        extra = torch.empty((group.rows, group.length, 0), dtype=torch.int64)
    if draws is None:
        nothing = torch.empty((0, 2), dtype=torch.int32)
        draws = Draws(torch.ones((len(wanted), 1)), nothing, torch.zeros_like(wanted))
    own = [batch.token_ids, group.positions, group.places, group.limits, extra, group.blocks, wanted]
    return [*own, draws.temperatures, draws.keys, draws.rows], kv.keys, kv.values


def _open(path: Path) -> torch._C._aoti.AOTIModelPackageLoader:
    """Load a package.

    As `torch._inductor.aoti_load_package` does in the end; but that first finds out which instructions this CPU has, in
    several processes one after the other, to compare them with the package's. Ours are part of its path.
    """
    run_single_threaded, num_runners, device_index = False, 1, -1
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", run_single_threaded, num_runners, device_index)


class CompiledForward:
    """Runs a loaded package with a loaded model's weights."""

    def __init__(self, path: Path, step: Step) -> None:
        loader = _open(path)
        weights = step.tensors
        # The package keeps pointers to them, and numbers for what the step holds, so both must stay.
        self._step = step
        self._weights = {name: weights[name].detach() for name in loader.get_constant_fqns()}
        use_inactive, check_full_update, user_managed = False, True, True
        loader.load_constants(self._weights, use_inactive, check_full_update, user_managed)
        # Its own call reads a description of the arguments anew each time, which takes longer than a small layer.
        self._run: Callable[[list[Tensor]], list[Tensor]] = loader.boxed_run

    def __call__(self, batch: ForwardBatch, draws: Draws | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute a batch for which `can_run` holds; see `Step.forward`. Without `draws` it draws greedily."""
        own, keys, values = arguments(batch, draws)
        # A package takes memory as it comes and does not look at strides.
        logits, scores, tokens = self._run([*(part.contiguous() for part in own), *keys, *values])
        return logits, scores, tokens

    def in_pieces(self, batch: ForwardBatch) -> Tensor:
        """Compute a batch of any kind, one group or piece of a prompt after the other; returns [n, vocab] logits."""
        found = [(self(piece)[0], where) for piece, where in pieces(batch)]
        logits = torch.empty(len(batch.logit_indices), found[0][0].shape[-1])
        for part, where in found:
            logits[where] = part
        return logits

    def check(self, batch: ForwardBatch, expected: Tensor) -> None:
        """Compare with the logits of the eager pass, and what is drawn from them with the noise as it is defined.

        Raises:
            CompileError: they differ.
        """
        count = len(batch.logit_indices)
        keys = noise.keys(range(1, count), range(1, count), noise.TARGET_STREAM, torch.device("cpu"))
        draws = Draws(torch.linspace(0.5, 1.5, count).unsqueeze(-1), keys, torch.arange(count))
        logits, scores, tokens = self(batch, draws)
        drawn = noise.scores(logits, draws.temperatures, draws.keys, draws.rows)
        if not (drawn - scores).abs().amax() < _NOISE_TOLERANCE or not torch.equal(tokens, scores.argmax(-1)):
            raise CompileError("the compiled pass draws other tokens than its logits and noise lead to")
        difference = float((expected - logits).abs().amax() / expected.abs().amax().clamp_min(1.0))
        if not difference < _TOLERANCE[batch.paged.kv.keys[0].dtype]:
            raise CompileError(f"the compiled pass differs from the eager one by {difference:.1e}")


def example(kv: KVTensors) -> tuple[ForwardBatch, Draws]:
    """Return what to trace with: two rows of five tokens in three blocks, one with a tree, seven logits, six keys."""
    parents = [-1, 0, 1, 2]
    rows = [ForwardRow([1] * 5, 40, [1, 2, 3], 5, parents), ForwardRow([2] * 5, 36, [4, 5, 6], 2)]
    keys = noise.keys(range(6), range(6), noise.TARGET_STREAM, torch.device("cpu"))
    return build(rows, kv), Draws(torch.full((7, 1), 0.7), keys, torch.arange(7))


def samples() -> list[list[ForwardRow]]:
    """Return rows of the shapes that rounds have: one and several, long and short, chains, a tree, part of a prompt."""
    one, five = ForwardRow([1], 20, [1, 2], 1), ForwardRow([1, 2, 3, 4, 5], 17, [3, 4], 5)
    tree = ForwardRow([1, 2, 3, 4], 9, [5], 4, parents=[-1, -1, 0])
    piece = ForwardRow([i % 8 for i in range(PIECE_LENGTH)], 30, [*range(1, 11)], 3)
    return [[one], [five], [tree], [one, five, tree], [ForwardRow([i], 0, [1 + i], 1) for i in range(9)], [piece]]


class GumbelNoise(nn.Module):
    """`noise.gumbel`, as a module that can be compiled."""

    def forward(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Return [n, vocab] noise."""
        return noise.plain_gumbel(keys, token_ids)


def load_noise(path: Path) -> None:
    """Draw noise with a package from now on.

    Raises:
        CompileError: its noise is other noise.
    """
    run: Callable[[list[Tensor]], list[Tensor]] = _open(path).boxed_run
    for count, vocab in ((1, 4096), (7, 1000)):
        keys = noise.keys(range(count), range(count), noise.TARGET_STREAM, torch.device("cpu"))
        token_ids = torch.arange(vocab, dtype=torch.int32)
        difference = float((run([keys, token_ids])[0] - noise.plain_gumbel(keys, token_ids)).abs().amax())
        if not difference < _NOISE_TOLERANCE:
            raise CompileError(f"the compiled noise differs from the eager one by {difference:.1e}")
    noise.implement("cpu", lambda keys, token_ids: run([keys, token_ids])[0])
