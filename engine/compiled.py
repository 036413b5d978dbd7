"""CompiledForward: a model's forward pass for short rows, compiled ahead of time, so that a pass costs its arithmetic.

A small model on a CPU is bound by what calling an operator costs: most of an eager pass is spent between the products.
AOTInductor turns the pass into one call. One package serves every batch, because rows, tokens and context are symbolic.
It holds code only; the weights stay the loaded model's.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine import noise
from engine.attention import KVTensors, PagedContext, TracedContext
from engine.batch import ForwardBatch, ForwardRow, build
from engine.errors import PacelineError
from engine.half_weights import with_half_weights

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_LENGTH = 64
"""Longer rows are prompts: their passes cost arithmetic."""
_NOISE_TOLERANCE = 1e-4
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class CompileError(PacelineError):
    """A model's forward pass cannot be compiled, or computes something else when it is."""


def call(
    module: nn.Module, token_ids: Tensor, positions: Tensor, wanted: Tensor, context: PagedContext | TracedContext
) -> Tensor:
    """Run a model's own forward, whatever it does behind its head included; returns [n, vocab] logits at `wanted`."""
    logits: Tensor = module(
        input_ids=token_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=wanted,
        paged=context,
    ).logits
    return logits[0]


class Step(nn.Module):
    """What is compiled: tokens and where they stand in, logits out; keys and values are written on the way."""

    def __init__(self, module: nn.Module, windows: list[int | None]) -> None:
        super().__init__()
        self.module = with_half_weights(module)
        self.windows = windows

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every weight by its name in a package."""
        return dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        blocks: Tensor,
        masks: list[Tensor],
        wanted: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """Compute [n, vocab] logits at `wanted`; the arguments are what `arguments` returns."""
        context = TracedContext(keys, values, slots, blocks, dict(zip(self.windows, masks, strict=True)))
        return call(self.module, token_ids, positions, wanted, context)


def can_run(batch: ForwardBatch) -> bool:
    """Return whether a batch is of the kind that is compiled: one group of short rows that read from blocks."""
    groups = batch.paged.groups
    return len(groups) == 1 and not groups[0].is_prompt_start and groups[0].length <= MAX_LENGTH


def arguments(batch: ForwardBatch, windows: list[int | None]) -> tuple[Any, ...]:
    """Return what `Step.forward` takes."""
    paged, (group,) = batch.paged, batch.paged.groups
    kv = paged.kv
    masks = [group.mask(window, 1, kv.keys[0], kv.block_size) for window in windows]
    blocks = group.blocks.view(group.rows, -1)
    return batch.token_ids, batch.positions, paged.slots, blocks, masks, batch.logit_indices, kv.keys, kv.values


class CompiledForward:
    """Runs a loaded package with a loaded model's weights."""

    def __init__(self, path: Path, step: Step) -> None:
        self._windows = step.windows
        package = torch._inductor.aoti_load_package(str(path))
        weights = step.tensors
        # The package keeps pointers to them, so they must stay.
        self._weights = {name: weights[name].detach() for name in package.loader.get_constant_fqns()}
        package.load_constants(self._weights, check_full_update=True, user_managed=True)
        # Its own call reads a description of the arguments anew each time, which takes longer than a small layer.
        self._run: Callable[[list[Tensor]], list[Tensor]] = package.loader.boxed_run

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Compute a batch for which `can_run` holds; returns [n, vocab] logits."""
        token_ids, positions, slots, blocks, masks, wanted, keys, values = arguments(batch, self._windows)
        # A package takes memory as it comes and does not look at strides.
        small = [part.contiguous() for part in (token_ids, positions, slots, blocks, *masks, wanted)]
        return self._run([*small, *keys, *values])[0]

    def check(self, batch: ForwardBatch, expected: Tensor) -> None:
        """Compare with the logits of the eager pass.

        Raises:
            CompileError: they differ.
        """
        difference = float((expected - self(batch).float()).abs().amax() / expected.abs().amax().clamp_min(1.0))
        if not difference < _TOLERANCE[batch.paged.kv.keys[0].dtype]:
            raise CompileError(f"the compiled pass differs from the eager one by {difference:.1e}")


def example(kv: KVTensors) -> ForwardBatch:
    """Return a batch to trace: two rows of five tokens in three blocks, seven logits."""
    rows = [ForwardRow([1] * 5, 40, [1, 2, 3], 5), ForwardRow([2] * 5, 36, [4, 5, 6], 2)]
    return build(rows, kv)


def samples() -> list[list[ForwardRow]]:
    """Return rows of the shapes that rounds have: one and several, long and short, chains and a tree."""
    one, five = ForwardRow([1], 20, [1, 2], 1), ForwardRow([1, 2, 3, 4, 5], 17, [3, 4], 5)
    tree = ForwardRow([1, 2, 3, 4], 9, [5], 4, parents=[-1, -1, 0])
    return [[one], [five], [tree], [one, five, tree], [ForwardRow([i], 0, [1 + i], 1) for i in range(9)]]


class GumbelNoise(nn.Module):
    """`noise.gumbel`, as a module that can be compiled."""

    def forward(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Return [n, vocab] noise."""
        return noise.gumbel(keys, token_ids)


def load_noise(path: Path) -> None:
    """Draw noise with a package from now on.

    Raises:
        CompileError: its noise is other noise.
    """
    run: Callable[[list[Tensor]], list[Tensor]] = torch._inductor.aoti_load_package(str(path)).loader.boxed_run
    for count, vocab in ((1, 4096), (7, 1000)):
        keys = noise.keys(range(count), range(count), noise.TARGET_STREAM, torch.device("cpu"))
        token_ids = torch.arange(vocab, dtype=torch.int32)
        difference = float((run([keys, token_ids])[0] - noise.gumbel(keys, token_ids)).abs().amax())
        if not difference < _NOISE_TOLERANCE:
            raise CompileError(f"the compiled noise differs from the eager one by {difference:.1e}")
    noise.use(lambda keys, token_ids: run([keys, token_ids])[0])
