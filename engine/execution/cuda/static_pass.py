"""StaticPass: a forward pass over buffers of fixed size and address, as a CUDA graph needs it.

A batch with fewer rows or tokens is padded. All of its numbers travel to the device in one copy, 32 bits each.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.execution.attention import Group, KVTensors, slots_of
from engine.execution.backend import PassOutput
from engine.execution.batch import ForwardBatch
from engine.execution.cuda.compiled_layers import TritonContext
from engine.models.causal_lm import CausalLM, forward
from engine.sampling import noise
from engine.sampling.noise import Draws

_FILLERS = {
    "token_ids": 0,
    "positions": 0,
    "slots": 0,
    "limits": 1,
    "logit_indices": 0,
    "key_low": 0,
    "key_high": 0,
    "is_drawn": 0,
}
"""What the fields of a token hold where a batch has none. Padding writes to block 0 and attends to place 0."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The size of a static pass.

    Attributes:
        rows: requests; length: tokens of each.
        num_extra: uncommitted places that a token attends to, for trees and branches; 0 for chains.
        width: blocks of a request's table.
    """

    rows: int
    length: int
    num_extra: int
    width: int

    @property
    def tokens(self) -> int:
        """Tokens of the pass, padding included."""
        return self.rows * self.length


class Staging:
    """Host memory of a pass's inputs; an event says when no copy to the device reads it any more. None: at once."""

    def __init__(self, template: Tensor, event: torch.cuda.Event | None) -> None:
        self._numbers = template.pin_memory() if event is not None else template.clone()
        self._copied = event

    def begin(self, template: Tensor) -> Tensor:
        """Wait until the last copy is over, and return memory that holds the template."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers[: len(template)].copy_(template)

    def send(self, packed: Tensor, device: Tensor) -> None:
        """Begin to copy what `begin` returned to the device."""
        device.copy_(packed, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class StaticPass:
    """A pass of one shape. `fill`, then `compute` or a recording of it, then `output`."""

    def __init__(self, model: CausalLM, kv: KVTensors, shape: Shape, outputs: PassOutput) -> None:
        """Allocate the inputs; every pass of a model leaves its results in `outputs`."""
        self._model = model
        self._outputs = outputs
        self.shape = shape
        tokens = shape.tokens
        fields = {name: torch.full((tokens,), filler, dtype=torch.int32) for name, filler in _FILLERS.items()}
        fields["temperatures"] = torch.ones(tokens).view(torch.int32)
        fields["extra"] = torch.full((tokens * shape.num_extra,), -1, dtype=torch.int32)
        fields["blocks"] = torch.zeros(shape.width * shape.rows, dtype=torch.int32)  # last, since it is cut
        self._template = torch.cat(list(fields.values()))
        self._sizes = [len(field) for field in fields.values()]
        self._names = list(fields)
        self._packed = self._template.to(model.device, copy=True)
        is_cuda = model.device.type == "cuda"
        # Two, so that the inputs of a pass are written while those of the last one are copied.
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
                    blocks=self._device["blocks"].view(shape.width, shape.rows).T,
                    positions=self._device["positions"].view(group_size),
                    places=self._device["slots"].view(group_size),
                    limits=self._device["limits"].view(group_size),
                    extra=self._device["extra"].view(*group_size, -1) if shape.num_extra else None,
                )
            ],
            self._device["slots"],
        )

    def fill(self, batch: ForwardBatch, draws: Draws | None) -> None:
        """Copy a batch of one group that is no larger than the shape; see `Backend.run`.

        Its tensors are the host's, but its token ids may be the device's.
        """
        (group,) = batch.paged.groups
        shape, width = self.shape, group.blocks.shape[1]
        used = len(self._template) - (shape.width - width) * shape.rows
        staging = next(self._stagings)
        packed = staging.begin(self._template[:used])
        host = self._split(packed)
        size, corner = (shape.rows, shape.length), (slice(group.rows), slice(group.length))
        is_on_host = batch.token_ids.device.type == "cpu"
        if is_on_host:
            host["token_ids"].view(size)[corner] = batch.token_ids.view(group.rows, -1)
        host["positions"].view(size)[corner] = group.positions
        host["slots"].view(size)[corner] = slots_of(group.blocks, group.places, self._context.kv.block_size)
        host["limits"].view(size)[corner] = group.limits
        if group.extra is not None:
            host["extra"].view(*size, -1)[*corner, : group.extra.shape[-1]] = group.extra
        host["blocks"].view(width, shape.rows)[:, : group.rows] = group.blocks.T
        count, indices = len(batch.logit_indices), batch.logit_indices
        host["logit_indices"][:count] = indices // group.length * shape.length + indices % group.length
        if draws is not None:
            host["temperatures"].view(torch.float32)[:count] = draws.temperatures.squeeze(-1)
            host["is_drawn"][:count] = draws.rows > 0
            if len(draws.keys):
                keys = draws.keys[(draws.rows - 1).clamp(min=0)]
                host["key_low"][:count], host["key_high"][:count] = keys.unbind(-1)
        staging.send(packed, self._packed[:used])
        if not is_on_host:
            self._device["token_ids"].view(size)[corner] = batch.token_ids.view(group.rows, -1).to(torch.int32)

    def compute(self) -> None:
        """Compute the batch in the buffers."""
        fields = self._device
        with self._context.current() as context:
            token_ids, positions = fields["token_ids"].long(), fields["positions"].long()
            logits = forward(self._model.module, token_ids, positions, fields["logit_indices"].long(), context).float()
        ids = self._model.vocab_slice
        vocab = torch.arange(ids.start, ids.stop, dtype=torch.int32, device=logits.device)
        keys = torch.stack([fields["key_low"], fields["key_high"]], -1)
        is_drawn = fields["is_drawn"].bool().unsqueeze(-1)
        gumbel = noise.gumbel(keys, vocab).masked_fill_(~is_drawn, 0.0)
        scores = gumbel.add_(logits / fields["temperatures"].view(torch.float32).unsqueeze(-1))
        for output, result in zip(self._outputs, (logits, scores, self._model.best_ids(scores)), strict=True):
            output[: self.shape.tokens].copy_(result)

    def output(self, count: int) -> PassOutput:
        """Return copies of the first `count` results, which later passes do not overwrite."""
        return PassOutput(*(output[:count].clone() for output in self._outputs))

    def _split(self, packed: Tensor) -> dict[str, Tensor]:
        """Return the fields of a packed tensor, by name; the last is as long as the rest of it."""
        sizes = [*self._sizes[:-1], len(packed) - sum(self._sizes[:-1])]
        return dict(zip(self._names, torch.split(packed, sizes), strict=True))
