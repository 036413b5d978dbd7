"""Unrolling: a head drafts from many places of whole texts at once, each time after the text's true tokens.

Up to the first rejected token these are the logits of serving, so one unrolling decides all rounds.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.heads.dense_context import DenseContext
from engine.heads.head import Head


class Drafts(NamedTuple):
    """The drafts that start at some places of some texts.

    Attributes:
        logits: [texts, starts, places, vocab] of the token after each place.
        hidden: [texts, starts, places, hidden] last hidden vectors; None for a head without a Markov part.
        previous: [texts, starts, places] the true token at each place.
    """

    logits: Tensor
    hidden: Tensor | None
    previous: Tensor


def unroll(head: Head, token_ids: Tensor, features: Tensor, starts: Tensor, num_places: int) -> Drafts:
    """Draft from many places at once.

    Args:
        token_ids: [texts, length].
        features: [texts, known, state_size] of their first tokens.
        starts: [texts, starts] the places of the last tokens before the drafts, from 1 to length - num_places, and
            not beyond the known features.
    """
    texts, known, _ = features.shape
    context = DenseContext(features)
    positions = torch.arange(known, device=token_ids.device).expand(texts, -1)
    head.absorb(token_ids[:, :known].reshape(1, -1), positions.reshape(1, -1), context)
    context.begin(starts)
    at = starts.unsqueeze(-1) + torch.arange(num_places, device=starts.device)
    previous = token_ids.gather(1, at.flatten(1)).view_as(at)
    head_any: Any = head
    if not head.drafts_blocks:
        every = torch.arange(starts.numel(), device=starts.device)
        passes = [
            head(previous[..., i].reshape(1, -1), at[..., i].reshape(1, -1), logits_to_keep=every, paged=context)
            for i in range(num_places)
        ]
        logits = torch.stack([output.logits[0] for output in passes], 1)
        return Drafts(logits.view(*at.shape, -1), None, previous)
    unread = head_any.num_unread
    at = starts.unsqueeze(-1) + torch.arange(unread + num_places, device=starts.device)
    block = torch.full_like(at, head.config.mask_token_id or 0)
    block[..., 0] = previous[..., 0]
    read = torch.arange(at.numel(), device=at.device).view_as(at)[..., unread:].reshape(-1)
    logits = head(block.view(1, -1), at.view(1, -1), logits_to_keep=read, paged=context).logits
    logits = logits.view(*previous.shape, -1)
    if (markov := head_any.markov_head) is None:
        return Drafts(logits, None, previous)
    hidden, state, biases = context.states.view(*previous.shape, -1), None, []
    for i in range(num_places):
        bias, state = markov(previous[..., i].flatten(), hidden[..., i, :].flatten(0, 1), state)
        biases.append(bias.view(*starts.shape, -1))
    bias, ids = torch.stack(biases, 2), head.target_ids
    return Drafts(logits + bias if ids is None else logits.index_add(-1, ids, bias), hidden, previous)
