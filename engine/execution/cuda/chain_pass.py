"""ChainPass: all passes of a draft chain as one recording; between them, nothing comes from the host.

The first pass computes the missing tokens of every row, each later one the token that was drawn before it. Positions,
slots and limits follow from the rows' lengths and block tables, and every pass has its noise keys. Sampling parameters
are applied by `row_shaping`. A grammar's masks come from the host, after it has seen the drawn tokens, so a chain with
a grammar cannot be one recording: it is drawn pass by pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.execution.attention import Group, KVTensors, slots_of
from engine.execution.backend import ChainBatch, ChainOutput
from engine.execution.cuda.compiled_layers import TritonContext
from engine.execution.cuda.kernels import draw_kernel
from engine.execution.cuda.static_pass import Outputs, Shape, StaticPass
from engine.models.causal_lm import CausalLM, forward
from engine.sampling import noise
from engine.sampling.row_shaping import RowShaping, count_tokens, shaped, unshaped

LENGTHS = (3, 9)
"""Tokens of a row that the first pass computes: few sizes, because each needs a recording per number of passes."""


@dataclass(frozen=True, slots=True, order=True)
class ChainShape:
    """The size of a chain's passes.

    Attributes:
        first: the first pass; it has at least two rows, since a layer compiled for one token alone is another one.
        steps: number of passes, and of tokens that each row draws.
        num_ranked: see `ChainBatch`.
        is_shaped: whether sampling parameters are applied.
    """

    first: Shape
    steps: int
    num_ranked: int = 0
    is_shaped: bool = False


def chain_shape(chain: ChainBatch, first: Shape | None) -> ChainShape | None:
    """Return the smallest shape that holds a chain, whose first pass has a shape; None if there is none."""
    if first is None or first.num_extra or chain.first.paged.groups[0].rows != len(chain.lengths):
        return None
    length = next((length for length in LENGTHS if length >= first.length), None)
    if length is None:
        return None
    first = Shape(max(2, first.rows), length, 0, first.width)
    return ChainShape(first, len(chain.draws), chain.num_ranked, chain.shaping is not None)


class ChainPass(StaticPass):
    """The passes of a chain of one shape. `fill_chain`, then `compute` or a recording of it, then `drawn`."""

    def __init__(
        self, model: CausalLM, kv: KVTensors, shape: ChainShape, outputs: Outputs, counts: Tensor | None = None
    ) -> None:
        """Allocate the inputs and the chain's own outputs.

        Args:
            counts: [rows, vocab] int32, at least as many rows as the shape's, shared by chains; to apply parameters.
        """
        rows, later = shape.first.rows, shape.steps - 1
        more = {"later_keys": torch.zeros((later, rows, 2), dtype=torch.int32)}
        more["lengths"] = torch.zeros(rows, dtype=torch.int32)
        if shape.is_shaped:
            more |= unshaped(rows, model.info.vocab_size)._asdict()
        super().__init__(model, kv, shape.first, outputs, num_logits=rows, more=more)
        self.chain_shape = shape
        device = model.device
        self._shaping: RowShaping | None = None
        if shape.is_shaped:
            assert counts is not None
            self._counts = counts[:rows]
            # Fields travel as int32; these two are float32.
            fields = [self._device[name].view(more[name].dtype).view(rows, -1) for name in RowShaping._fields]
            self._shaping = RowShaping(*fields)
        self._ones = torch.ones(rows, device=device)
        self._row_numbers = torch.arange(rows, device=device)
        self._later = torch.arange(later, device=device).unsqueeze(-1)
        self._tokens = torch.zeros((shape.steps, rows), dtype=torch.int64, device=device)
        ranked = (shape.steps, rows, shape.num_ranked)
        self._top_scores, self._top_ids = (
            torch.zeros(ranked, dtype=t, device=device) for t in (torch.float, torch.int64)
        )

    def fill_chain(self, chain: ChainBatch) -> None:
        """Copy a chain that is no larger than the shape."""
        later_keys = torch.zeros((self.chain_shape.steps - 1, self.shape.rows, 2), dtype=torch.int32)
        for keys, draws in zip(later_keys, chain.draws[1:], strict=True):
            keys[: len(chain.lengths)] = draws.row_keys()
        more = {"later_keys": later_keys, "lengths": torch.tensor(chain.lengths, dtype=torch.int32)}
        if chain.shaping is not None:
            more |= chain.shaping._asdict()
            count_tokens(self._counts, chain.prompts, chain.outputs)
        self.fill(chain.first, chain.draws[0], more)

    def compute(self) -> None:
        """Compute the passes and draw their tokens."""
        logits, temperatures, keys, is_drawn = self._compute_logits()
        self._draw(0, logits, temperatures, keys, is_drawn)
        kv, (group,) = self._context.kv, self._context.groups
        places = self._device["lengths"] + self._later  # [steps - 1, rows]
        slots = slots_of(group.blocks.long(), places.T.long(), kv.block_size).T.contiguous()
        positions = places.clamp(max=self._model.info.max_model_len - 1).long()
        limits = (places + 1).clamp(max=self.shape.width * kv.block_size)
        later_keys = self._device["later_keys"].view(len(places), self.shape.rows, 2)
        for step in range(1, self.chain_shape.steps):
            row = step - 1
            column = (self.shape.rows, 1)
            later = Group(
                start=0,
                rows=self.shape.rows,
                length=1,
                blocks=group.blocks,
                positions=positions[row].view(column),
                places=slots[row].view(column),
                limits=limits[row].view(column),
            )
            with TritonContext(kv, [later], slots[row]).current() as context:
                tokens = self._tokens[row]
                logits.copy_(forward(self._model.module, tokens, positions[row], self._row_numbers, context))
            self._draw(step, logits, temperatures, later_keys[row], is_drawn)

    def _draw(self, step: int, logits: Tensor, temperatures: Tensor, keys: Tensor, is_drawn: Tensor) -> None:
        if self._shaping is not None:
            logits, temperatures = shaped(logits, self._shaping, self._counts, step), self._ones
        tokens = draw_kernel.draw(logits, temperatures, keys, is_drawn)
        self._tokens[step].copy_(tokens)
        if self._shaping is not None:
            self._counts.scatter_add_(1, tokens.unsqueeze(-1), torch.ones_like(self._counts[:, :1]))
        if self.chain_shape.num_ranked:
            rows = (self._row_numbers + 1) * is_drawn
            scores = noise.scores(logits, temperatures.unsqueeze(-1), keys, rows, noise.gumbel)
            best, ids = scores.topk(self.chain_shape.num_ranked, -1)
            self._top_scores[step].copy_(best)
            self._top_ids[step].copy_(ids)

    def drawn(self, count: int) -> ChainOutput:
        """Return copies of the first `count` rows' tokens, which travel to the host, and of their rankings."""
        tokens = self._tokens[:, :count].T.clone().to("cpu", non_blocking=True)
        rankings = zip(self._top_scores[:, :count].clone(), self._top_ids[:, :count].clone(), strict=True)
        return ChainOutput(tokens, list(rankings) if self.chain_shape.num_ranked else [])
