"""ChainPass: all passes of a draft chain as one recording; between them, nothing comes from the host.

The first pass computes each row's missing tokens, and every later pass the token drawn before it. Positions, slots and
limits follow from the rows' lengths and block tables. A grammar's masks come from the host after every drawn token, so
a chain with a grammar is drawn pass by pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.execution.attention import Group
from engine.execution.backend import ChainBatch, RankedTokens
from engine.execution.cuda.compiled_layers import TritonContext
from engine.execution.cuda.kernels import draw_kernel
from engine.execution.cuda.static_pass import ROWS, Outputs, Shape, StaticPass, scores_of, steps_up_to
from engine.execution.kv_tensors import KVTensors, slots_of
from engine.models.causal_lm import CausalLM, forward
from engine.sampling.row_shaping import MAX_BIASED, RowShaping, shaped

FIRST_LENGTH = 3
"""Most tokens of a row in the first pass; if a row lacks more tokens, the chain is drawn pass by pass."""
STEPS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Recorded numbers of passes; tokens that are drawn beyond the end of a shorter chain are dropped."""


class ChainShape(NamedTuple):
    """The size of a chain's passes; `first` has at least two rows, as layers are compiled differently for one token."""

    first: Shape
    steps: int
    num_ranked: int = 0
    is_shaped: bool = False


def chain_shape(chain: ChainBatch) -> ChainShape | None:
    """Return the smallest shape that holds a chain, or None."""
    group, *others = chain.first.paged.groups
    rows = next((rows for rows in ROWS[1:] if rows >= group.rows), None)
    if rows is None or others or group.rows != len(chain.lengths) or group.length > FIRST_LENGTH:
        return None
    steps = next(steps for steps in STEPS if steps >= len(chain.draws))
    return ChainShape(Shape(rows, FIRST_LENGTH, 0), steps, chain.num_ranked, chain.shaping is not None)


def chain_shapes(max_rows: int, num_steps: int, num_ranked: int) -> list[ChainShape]:
    """Return the shapes of chains of up to `num_steps` tokens, the largest first."""
    return [
        ChainShape(Shape(rows, FIRST_LENGTH, 0), steps, num_ranked, is_shaped)
        for rows in reversed(steps_up_to(max_rows, ROWS[1:]))
        for steps in steps_up_to(num_steps, STEPS)
        for is_shaped in (False, True)
        if num_steps > 1
    ]


class ChainPass(StaticPass):
    """The passes of a chain of one shape: call `fill_chain`, then `compute` or its recording, then `drawn`."""

    def __init__(self, model: CausalLM, kv: KVTensors, width: int, shape: ChainShape, outputs: Outputs) -> None:
        rows, num_later = shape.first.rows, shape.steps - 1
        sizes = {"later_keys": 2 * num_later * rows, "lengths": rows}
        if shape.is_shaped:
            sizes |= {"numbers": 7 * rows} | dict.fromkeys(RowShaping._fields[1:], MAX_BIASED * rows)
        more = {name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()}
        if shape.is_shaped:  # rows without a request are shaped, too
            more["numbers"] = torch.ones(7 * rows).view(torch.int32)
        super().__init__(model, kv, width, shape.first, outputs, more)
        self.chain_shape = shape
        # How often each token was drawn, kept in rows of logits that no chain uses.
        self._counts = outputs.logits[-rows:].view(torch.int32)
        self._rows = torch.arange(rows, device=model.device)
        self._later = torch.arange(num_later, device=model.device).unsqueeze(-1)
        self._tokens = torch.zeros((shape.steps, rows), dtype=torch.int64, device=model.device)
        self._top_scores = torch.zeros((shape.steps, rows, shape.num_ranked), device=model.device)
        self._top_ids = torch.zeros_like(self._top_scores, dtype=torch.int64)

    def fill_chain(self, chain: ChainBatch) -> None:
        """Copy a chain that is no larger than the shape."""
        later_keys = torch.zeros((self.chain_shape.steps - 1, self.shape.rows, 2), dtype=torch.int32)
        for keys, draws in zip(later_keys, chain.draws[1:], strict=False):
            keys[: len(chain.lengths)] = draws.row_keys()
        more = {"later_keys": later_keys, "lengths": torch.tensor(chain.lengths, dtype=torch.int32)}
        if chain.shaping is not None:
            shaping, counted = chain.shaping
            counted = counted.pin_memory() if self._counts.is_cuda else counted
            places, added = counted.to(self._counts.device, non_blocking=True)
            self._counts.zero_().view(-1).index_add_(0, places, added.int())
            more |= shaping._asdict()
        self.fill(chain.first, chain.draws[0], more)

    def compute(self) -> None:
        """Compute the passes and draw their tokens."""
        kv, (group,), rows = self._context.kv, self._context.groups, self.shape.rows
        logits, temperatures, keys, is_drawn = self._compute_logits(rows)
        self._draw(0, logits, temperatures, keys, is_drawn)
        places = (self._device["lengths"] + self._later).long()  # [steps - 1, rows]
        slots = slots_of(group.blocks.long(), places.T, kv.block_size).T.contiguous()
        positions = places.clamp(max=self._model.info.max_model_len - 1)
        limits = (places + 1).clamp(max=group.blocks.shape[1] * kv.block_size)
        later_keys = self._device["later_keys"].view(-1, rows, 2)
        for step, tokens in enumerate(self._tokens[:-1]):
            position, place, limit = (numbers[step].view(rows, 1) for numbers in (positions, slots, limits))
            later = Group(0, rows, 1, group.blocks, position, place, limit)
            with TritonContext(kv, [later], slots[step]).current() as context:
                logits.copy_(forward(self._model.module, tokens, positions[step], self._rows, context))
            self._draw(step + 1, logits, temperatures, later_keys[step], is_drawn)

    def _draw(self, step: int, logits: Tensor, temperatures: Tensor, keys: Tensor, is_drawn: Tensor) -> None:
        if self.chain_shape.is_shaped:
            numbers, ids, biases, counts = (self._device[name].view(len(logits), -1) for name in RowShaping._fields)
            rows = RowShaping(numbers.view(torch.float32), ids, biases.view(torch.float32), counts)
            logits, temperatures = shaped(logits, rows, self._counts, step), torch.ones_like(temperatures)
        tokens = draw_kernel.draw(logits, temperatures, keys, is_drawn)
        self._tokens[step].copy_(tokens)
        if self.chain_shape.is_shaped:
            self._counts.scatter_add_(1, tokens.unsqueeze(-1), torch.ones_like(self._counts[:, :1]))
        if self.chain_shape.num_ranked:
            scores = scores_of(logits, temperatures, keys, is_drawn)
            torch.topk(scores, self.chain_shape.num_ranked, out=(self._top_scores[step], self._top_ids[step]))

    def drawn(self, chain: ChainBatch) -> tuple[Tensor, list[RankedTokens]]:
        """Return copies of the chain's results; see `Backend.draw_chain`."""
        used = slice(len(chain.draws)), slice(len(chain.lengths))
        tokens = self._tokens[used].T.clone().to("cpu", non_blocking=True)
        rankings = zip(self._top_scores[used].clone(), self._top_ids[used].clone(), strict=True)
        return tokens, list(rankings) if self.chain_shape.num_ranked else []
