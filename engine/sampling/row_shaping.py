"""RowShaping: sampling parameters as tensors, applied without looking at them, so that a CUDA graph can record it.

`logits.shape` leaves out the steps that no row needs, and computes the others with the functions of this file. A
grammar has no such tensors: its masks depend on tokens and come from the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.protocols import Request
from engine.sampling.top_tokens import top

MAX_BIASED = 64
"""Biased tokens of a row, tokens that end the text included."""
_IN_PROMPT = 1 << 30
"""Added to the count of a token that is in the prompt."""


class RowShaping(NamedTuple):
    """The parameters of n rows.

    Attributes:
        numbers: [n, 7] float32: temperature, min_p, top_p, top_k, and the repetition, frequency and presence penalties.
        biased_ids: [n, MAX_BIASED] int32; biases: [n, MAX_BIASED] float32.
        num_biased: [n, MAX_BIASED] int32, the number of draws, from the first one on, that a bias is for.
    """

    numbers: Tensor
    biased_ids: Tensor
    biases: Tensor
    num_biased: Tensor


def row_shaping(
    requests: Sequence[Request], drafted: Sequence[Sequence[int]], end_ids: Sequence[int], vocab: int
) -> tuple[RowShaping, Tensor] | None:
    """Return the parameters of a row per request, and [2, m] places in the flat counts of `shaped` and their values.

    None if a row has a grammar or too many biases.

    Args:
        drafted: per row, the draft tokens between the committed tip and the first draw.
        end_ids: tokens that end every text; none may be drawn before min_tokens.
    """
    numbers, biases, places, added = [], [], [], []
    for row, (request, tokens) in enumerate(zip(requests, drafted, strict=True)):
        params, missing = request.params, request.params.min_tokens - request.num_output_tokens - len(tokens)
        ends = {*end_ids, *params.stop_token_ids} if missing > 0 else ()
        biased = [(token, bias, 2**31 - 1) for token, bias in params.logit_bias.items() if token < vocab]
        biased += [(token, float("-inf"), missing) for token in ends if token < vocab]
        if params.grammar is not None or len(biased) > MAX_BIASED:
            return None
        biases.append(biased + [(0, 0.0, 0)] * (MAX_BIASED - len(biased)))
        top_p, top_k = (params.top_p, params.top_k) if params.temperature > 0 else (1.0, 0)
        limit = top_k if 0 < top_k < vocab else vocab
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        numbers.append([params.temperature or 1.0, params.min_p, top_p, limit, *penalties])
        if params.has_penalties:
            prompt = {*request.token_ids[request.input_length : request.prompt_length]}
            output = [*request.output, *tokens]
            places += [row * vocab + token for token in (*prompt, *output)]
            added += [_IN_PROMPT] * len(prompt) + [1] * len(output)
    ids, values, counts = (torch.tensor([[entry[i] for entry in row] for row in biases]) for i in range(3))
    shaping = RowShaping(torch.tensor(numbers), ids.int(), values.float(), counts.int())
    return shaping, torch.tensor([places, added], dtype=torch.int64)


def shaped(logits: Tensor, rows: RowShaping, counts: Tensor, draw: int) -> Tensor:
    """Return logits [n, vocab] as `logits.shape` shapes them, for a row's draw number `draw`, from 0.

    Args:
        counts: [n, vocab] int32, from `row_shaping`, and 1 more for every token drawn since.
    """
    temperature, min_p, top_p, top_k, *penalties = torch.split(rows.numbers, 1, -1)
    logits = logits.scatter_add(-1, rows.biased_ids.long(), torch.where(rows.num_biased > draw, rows.biases, 0.0))
    logits = penalise(logits, counts > 0, counts & (_IN_PROMPT - 1), *penalties)
    scale(logits, temperature, min_p)
    return top(logits, top_k.long(), top_p, logits.shape[-1])[0]


def penalise(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Return logits with penalties, [n, 1] each, for tokens `seen` in prompt or output and `counts` in the output."""
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * counts - presence * (counts > 0)


def scale(logits: Tensor, temperature: Tensor | None, min_p: Tensor | None) -> None:
    """Divide by the temperatures and forbid tokens below min_p, in place; [n, 1] each, None where no row needs it."""
    if temperature is not None:
        logits.div_(temperature)
    if min_p is not None:
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + min_p.log(), float("-inf"))
