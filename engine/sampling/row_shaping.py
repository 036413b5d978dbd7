"""RowShaping: sampling parameters as tensors, applied without reading them, so that a CUDA graph can record it.

`logits.shape` omits steps that no row needs, and shares the other steps. Grammars are excluded: their masks depend on
tokens and come from the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.protocols import Request
from engine.sampling.top_tokens import top

MAX_BIASED = 64
"""Biased tokens of a row, including tokens that end the text."""
_IN_PROMPT = 1 << 30
"""Added to the count of a token that is in the prompt."""


class RowShaping(NamedTuple):
    """The parameters of n rows."""

    numbers: Tensor  # [n, 7] float32: temperature, min_p, top_p, top_k, repetition, frequency, presence
    biased_ids: Tensor  # [n, MAX_BIASED] int32
    biases: Tensor  # [n, MAX_BIASED] float32
    num_biased: Tensor  # [n, MAX_BIASED] int32, how many of the next draws a bias is for


def row_shaping(
    requests: Sequence[Request], drafted: Sequence[Sequence[int]], end_ids: Sequence[int], vocab: int
) -> tuple[RowShaping, Tensor] | None:
    """Return a row per request, and [2, m] indices in the flat counts of `shaped` with their values.

    Returns None if a row has a grammar or too many biases. `drafted` are each row's draft tokens before the first draw;
    `end_ids` end every text.
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
    """Return logits [n, vocab] as `logits.shape` shapes them for a row's draw number `draw`; counts: [n, vocab]."""
    temperature, min_p, top_p, top_k, *penalties = torch.split(rows.numbers, 1, -1)
    logits = logits.scatter_add(-1, rows.biased_ids.long(), torch.where(rows.num_biased > draw, rows.biases, 0.0))
    logits = penalise(logits, counts > 0, counts & (_IN_PROMPT - 1), *penalties)
    scale(logits, temperature, min_p)
    return top(logits, top_k.long(), top_p, logits.shape[-1])[0]


def penalise(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Return logits with penalties [n, 1], for tokens `seen` in prompt or output and `counts` in the output."""
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * counts - presence * (counts > 0)


def scale(logits: Tensor, temperature: Tensor | None, min_p: Tensor | None) -> None:
    """Divide by temperatures and forbid tokens below min_p, in place; [n, 1] each, None where no row needs it."""
    if temperature is not None:
        logits.div_(temperature)
    if min_p is not None:
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + min_p.log(), float("-inf"))
