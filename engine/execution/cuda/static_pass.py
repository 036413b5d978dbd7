"""StaticPass: a forward pass over buffers of fixed size and address, as a CUDA graph needs it.

A batch with fewer rows or tokens is padded. All of its numbers travel to the device in one copy, 32 bits each.
"""

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.execution.attention import Group
from engine.execution.backend import PassOutput
from engine.execution.batch import ForwardBatch
from engine.execution.cuda.compiled_layers import TritonContext
from engine.execution.cuda.kernels import draw_kernel
from engine.execution.kv_tensors import KVTensors, slots_of
from engine.models.causal_lm import CausalLM, forward
from engine.sampling import noise
from engine.sampling.noise import Draws

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_EXTRA = (0, 4, 8, 16, 64)
_FILLERS = {"token_ids": 0, "positions": 0, "slots": 0, "limits": 1, "logit_indices": -1, "is_drawn": 0}
"""A padding token's fields: it writes to block 0 and attends to place 0. Padding logits are the last token's; they do
not overwrite its state."""


class Outputs(NamedTuple):
    """The results of every pass of a model: logits [n, vocab] float32, and the drawn tokens [n] int64."""

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The size of a static pass: `rows` requests of `length` tokens.

    `num_extra` counts uncommitted places that a token attends to, for trees and branches; it is 0 for chains.
    """

    rows: int
    length: int
    num_extra: int

    @property
    def tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.rows * self.length


def steps_up_to(size: int, ladder: Sequence[int]) -> Sequence[int]:
    """Return the steps of a ladder up to the first that is at least `size`."""
    return ladder[: bisect_left(ladder, size) + 1]


class Staging:
    """Host memory of a pass's inputs; the event, None on a CPU, tells when they have been copied to the device."""

    def __init__(self, template: Tensor, event: torch.cuda.Event | None) -> None:
        self._numbers = template.pin_memory() if event is not None else template.clone()
        self._copied = event

    def begin(self, template: Tensor) -> Tensor:
        """Wait until the last copy is over, and return memory that holds the template."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers[: len(template)].copy_(template)

    def send(self, packed: Tensor, device: Tensor) -> None:
        """Start copying to the device what `begin` returned."""
        device.copy_(packed, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class StaticPass:
    """A pass of one shape: call `fill`, then `compute` or its recording, then `output`."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVTensors,
        width: int,
        shape: Shape,
        outputs: Outputs,
        more: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Allocate inputs, with `width` blocks per request; `more` holds other int32 inputs, filled as for padding."""
        self._model = model
        self._outputs = outputs
        self.shape = shape
        tokens = shape.tokens
        fields = {name: torch.full((tokens,), filler, dtype=torch.int32) for name, filler in _FILLERS.items()}
        fields["keys"] = torch.zeros(2 * tokens, dtype=torch.int32)
        fields["temperatures"] = torch.ones(tokens).view(torch.int32)
        fields |= more or {}
        fields["extra"] = torch.full((tokens * shape.num_extra,), -1, dtype=torch.int32)
        fields["blocks"] = torch.zeros(width * shape.rows, dtype=torch.int32)  # last, since it is cut
        self._template = torch.cat(list(fields.values()))
        self._sizes = [len(field) for field in fields.values()]
        self._names = list(fields)
        self._packed = self._template.to(model.device, copy=True)
        is_cuda = model.device.type == "cuda"
        # Two, so that a pass's inputs are written while the previous pass's inputs are copied.
        events = [torch.cuda.Event() if is_cuda else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._stagings = itertools.cycle([Staging(self._template, event) for event in events])
        self._device = self._split(self._packed)
        group_size = (shape.rows, shape.length)
        self._context = TritonContext(
            kv,
            [
                Group(
                    start=0,
                    rows=shape.rows,
                    length=shape.length,
                    blocks=self._device["blocks"].view(width, shape.rows).T,
                    positions=self._device["positions"].view(group_size),
                    places=self._device["slots"].view(group_size),
                    limits=self._device["limits"].view(group_size),
                    extra=self._device["extra"].view(*group_size, -1) if shape.num_extra else None,
                )
            ],
            self._device["slots"],
        )

    def fill(self, batch: ForwardBatch, draws: Draws | None, more: Mapping[str, Tensor] | None = None) -> None:
        """Copy a batch that fits into the shape; a row longer than the shape's takes several rows.

        The batch is on the host, but token ids of a single group may be on the device. Inputs in `more` may be shorter
        than allocated.
        """
        groups, shape, block_size = batch.paged.groups, self.shape, self._context.kv.block_size
        size, width = (shape.rows, shape.length), max(group.blocks.shape[1] for group in groups)
        unused = (self._context.groups[0].blocks.shape[1] - width) * shape.rows
        used = len(self._template) - unused
        staging = next(self._stagings)
        packed = staging.begin(self._template[:used])
        host = self._split(packed)
        indices, num_rows = [], 0
        for group in groups:
            repeats = -(-group.length // shape.length)
            first = num_rows + repeats * torch.arange(group.rows).unsqueeze(-1)
            index = (first * shape.length + torch.arange(group.length)).flatten()
            rows = slice(num_rows, num_rows + repeats * group.rows)
            host["positions"][index] = group.positions.flatten().int()
            host["slots"][index] = slots_of(group.blocks, group.places, block_size).flatten().int()
            host["limits"][index] = group.limits.flatten().int()
            if group.extra is not None:
                extra = group.extra.flatten(0, 1)
                host["extra"].view(shape.tokens, -1)[index, : extra.shape[-1]] = extra.int()
            blocks = group.blocks if repeats == 1 else group.blocks.repeat_interleave(repeats, 0)
            host["blocks"].view(width, shape.rows)[: blocks.shape[1], rows] = blocks.T
            indices.append(index)
            num_rows = rows.stop
        index = torch.cat(indices)
        is_on_host = batch.token_ids.device.type == "cpu"
        if is_on_host:
            host["token_ids"][index] = batch.token_ids.int()
        count = len(batch.logit_indices)
        host["logit_indices"][:count] = index[batch.logit_indices]
        if draws is not None:
            host["temperatures"].view(torch.float32)[:count] = draws.temperatures.squeeze(-1)
            host["is_drawn"][:count] = draws.rows > 0
            host["keys"].view(-1, 2)[:count] = draws.row_keys()
        for name, numbers in (more or {}).items():
            host[name][: numbers.numel()] = numbers.flatten().view(torch.int32)
        staging.send(packed, self._packed[:used])
        if not is_on_host:
            (group,) = groups
            ids = batch.token_ids.view(group.rows, group.length).to(torch.int32)
            self._device["token_ids"].view(size)[: group.rows, : group.length] = ids

    def compute(self) -> None:
        """Compute the batch in the buffers."""
        count = min(self.shape.tokens, len(self._outputs.tokens))
        self._outputs.tokens[:count].copy_(draw_kernel.draw(*self._compute_logits(count)))

    def _compute_logits(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Write the first `count` rows of logits to the outputs; return the arguments of `draw_kernel.draw`."""
        fields, logits = self._device, self._outputs.logits[:count]
        with self._context.current() as context:
            token_ids, positions, indices = (
                fields[name].long() for name in ("token_ids", "positions", "logit_indices")
            )
            logits.copy_(forward(self._model.module, token_ids, positions, indices[:count], context))
        return logits, *self._draw_arguments(count)

    def _draw_arguments(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        temperatures, keys, is_drawn = (self._device[name] for name in ("temperatures", "keys", "is_drawn"))
        return temperatures.view(torch.float32)[:count], keys.view(-1, 2)[:count], is_drawn[:count]

    def output(self, batch: ForwardBatch, draws: Draws | None) -> PassOutput:
        """Return copies of the batch's results; logits and scores are empty unless the batch needs them."""
        count = len(batch.logit_indices)
        logits, tokens = self._outputs.logits[:count], self._outputs.tokens[:count].clone()
        if not batch.needs_logits:
            return PassOutput(logits[:0], logits[:0], tokens)
        scores = logits = logits.clone()
        if draws is not None:
            scores = scores_of(logits, *self._draw_arguments(count))
        return PassOutput(logits, scores, tokens)

    def _split(self, packed: Tensor) -> dict[str, Tensor]:
        sizes = [*self._sizes[:-1], len(packed) - sum(self._sizes[:-1])]
        return dict(zip(self._names, torch.split(packed, sizes), strict=True))


def scores_of(logits: Tensor, temperatures: Tensor, keys: Tensor, is_drawn: Tensor) -> Tensor:
    """Return the scores [n, vocab] that `draw_kernel.draw` compares."""
    rows = torch.arange(1, len(logits) + 1, device=logits.device) * is_drawn
    return noise.scores(logits, temperatures.unsqueeze(-1), keys, rows, noise.gumbel)
