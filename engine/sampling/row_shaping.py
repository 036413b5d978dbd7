"""RowShaping: sampling parameters as tensors, applied without looking at them, so that a CUDA graph can record it.

`logits.shape` calls the same functions, for the rows that need them. A grammar's masks depend on the drawn tokens and
come from the host, so rows with a grammar have no such tensors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.params import SamplingParams
from engine.sampling.top_tokens import top

MAX_BIASED = 64
"""Biased tokens of a row, tokens that end the text included."""
_ALWAYS = 2**31 - 1
_IN_PROMPT = 1 << 30
"""Added to the count of a token that is in the prompt."""


class RowShaping(NamedTuple):
    """The parameters of n rows.

    Attributes:
        numbers: [n, 7] float32: temperature, min_p, top_p, top_k, and the repetition, frequency and presence penalties.
        biased_ids: [n, MAX_BIASED] int32.
        biases: [n, MAX_BIASED] float32.
        num_biased: [n, MAX_BIASED] int32, the number of draws, from the first one on, that a bias is for.
    """

    numbers: Tensor
    biased_ids: Tensor
    biases: Tensor
    num_biased: Tensor


def unshaped(count: int, vocab: int) -> RowShaping:
    """Return the parameters of rows that stay as they are."""
    size = (count, MAX_BIASED)
    zeros = torch.zeros(size, dtype=torch.int32)
    return RowShaping(torch.tensor([[1.0, 0, 1, vocab, 1, 0, 0]]).repeat(count, 1), zeros, torch.zeros(size), zeros)


def row_shaping(
    params: Sequence[SamplingParams], end_ids: Sequence[Sequence[int]], num_outputs: Sequence[int], vocab: int
) -> RowShaping | None:
    """Return the parameters of some rows; None if one has a grammar or too many biases.

    Args:
        end_ids: per row, the tokens that may not be drawn before min_tokens.
        num_outputs: per row, the tokens between its prompt and its first draw.
    """
    numbers, biases = [], []
    for row, ends, num_output in zip(params, end_ids, num_outputs, strict=True):
        biased = [(token, bias, _ALWAYS) for token, bias in row.logit_bias.items()]
        biased += [(token, float("-inf"), row.min_tokens - num_output) for token in ends if row.min_tokens > num_output]
        biased = [entry for entry in biased if entry[0] < vocab]
        if row.grammar is not None or len(biased) > MAX_BIASED:
            return None
        top_p, top_k = (row.top_p, row.top_k) if row.temperature > 0 else (1.0, 0)
        limit = top_k if 0 < top_k < vocab else vocab
        penalties = (row.repetition_penalty, row.frequency_penalty, row.presence_penalty)
        numbers.append([row.temperature or 1.0, row.min_p, top_p, limit, *penalties])
        biases.append(biased + [(0, 0.0, 0)] * (MAX_BIASED - len(biased)))
    ids, values, counts = (torch.tensor([[entry[i] for entry in row] for row in biases]) for i in range(3))
    return RowShaping(torch.tensor(numbers), ids.int(), values, counts.int())


def count_tokens(counts: Tensor, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
    """Set the counts [rows, vocab] int32 of the first rows to those of their tokens, all others to 0; no waiting."""
    vocab = counts.shape[-1]
    prompt = [row * vocab + token for row, tokens in enumerate(prompts) for token in set(tokens)]
    output = [row * vocab + token for row, tokens in enumerate(outputs) for token in tokens]
    added = [_IN_PROMPT] * len(prompt) + [1] * len(output)
    packed = torch.tensor([prompt + output, added], dtype=torch.int64, pin_memory=counts.is_cuda)
    index, added_counts = packed.to(counts.device, non_blocking=True)
    counts.zero_().view(-1).index_add_(0, index, added_counts.int())


def shaped(logits: Tensor, rows: RowShaping, counts: Tensor, draw: int) -> Tensor:
    """Return logits [n, vocab] as `logits.shape` shapes them, for a row's draw number `draw`, from 0.

    Args:
        counts: [n, vocab] int32, from `count_tokens`, and 1 more for every token drawn since.
    """
    temperature, min_p, top_p, top_k, *penalties = torch.split(rows.numbers, 1, -1)
    logits = logits.scatter_add(-1, rows.biased_ids.long(), torch.where(rows.num_biased > draw, rows.biases, 0.0))
    logits = penalise(logits, counts > 0, counts & (_IN_PROMPT - 1), *penalties) / temperature
    logits = logits.masked_fill(below_min_p(logits, min_p), float("-inf"))
    return top(logits, top_k.long(), top_p, logits.shape[-1])[0]


def penalise(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Return logits with penalties, [n, 1] each, for tokens `seen` in prompt or output and `counts` in the output."""
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * counts - presence * (counts > 0)


def below_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Return which tokens of logits [n, vocab] are less likely than the likeliest times min_p, [n, 1]."""
    return logits < logits.amax(-1, keepdim=True) + min_p.log()
