"""Unrolls a head over texts: the logits of drafts that start at many places, each after the text's true tokens.

While a draft is accepted, its tokens are those of the text. So these are the very logits of serving up to the first
rejected token, and what `measured_acceptance` says of a draft model holds: one unrolling decides all rounds.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.heads.head import Head
from engine.models.first_layers import decoder_layers
from engine.training.heads.dense_context import DenseContext
from engine.training.measured_acceptance import Acceptance, Continuations, DraftAcceptance, draw


class Drafts(NamedTuple):
    """The drafts that start at some places of some texts.

    Attributes:
        logits: [texts, starts, places, vocab] of the token after each place.
        hidden: [texts, starts, places, hidden] the last hidden vectors; None of a head without a Markov part.
        previous: [texts, starts, places] the true token at each place.
    """

    logits: Tensor
    hidden: Tensor | None
    previous: Tensor


@torch.no_grad()
def read_target(target: PreTrainedModel, taps: Sequence[int], token_ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the outputs of tapped layers, [texts, length, width] each, and the logits of texts [texts, length]."""
    outputs: dict[int, Tensor] = {}
    _, layers = decoder_layers(target)
    hooks = [layers[tap - 1].register_forward_hook(partial(_keep, outputs, tap)) for tap in set(taps)]
    try:
        logits = target(input_ids=token_ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return [outputs[tap] for tap in taps], logits


def _keep(outputs: dict[int, Tensor], tap: int, _layer: nn.Module, _inputs: object, output: Any) -> None:
    outputs[tap] = output if isinstance(output, Tensor) else output[0]


def unroll(head: Head, token_ids: Tensor, taps: Sequence[Tensor], starts: Tensor, num_places: int) -> Drafts:
    """Draft at many places at once.

    Args:
        token_ids: [texts, length].
        taps: the target's outputs for them, as from `read_target`.
        starts: [texts, starts] the places of the last tokens before the drafts, from 1 to length - num_places.
    """
    texts, length = token_ids.shape
    context = DenseContext(head.feature([tap.flatten(0, 1) for tap in taps]).view(texts, length, -1))
    positions = torch.arange(length, device=token_ids.device).expand(texts, -1)
    head.absorb(token_ids.reshape(1, -1), positions.reshape(1, -1), context)
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


@torch.inference_mode()
def head_acceptance(head: Head, target: PreTrainedModel, continuations: Continuations, k: int) -> Acceptance:
    """Draft from every place of the target's continuations, and compare with its text.

    Args:
        k: draft tokens at most; a block has no more than it was trained for.
    """
    k = min(k, head.config.max_draft_tokens)
    rows = []
    for seed, (ids, begin, end) in enumerate(continuations.texts()):
        starts = torch.arange(max(1, begin - 1), end - k, device=ids.device)
        places = (starts.unsqueeze(-1) + 1 + torch.arange(k, device=ids.device)).flatten()
        taps, _ = read_target(target, head.config.taps, ids[None])
        logits = unroll(head, ids[None], taps, starts[None], k).logits.flatten(0, 2)
        drawn = draw(logits, continuations.temperature, [seed] * len(places), places.tolist())
        rows.append((drawn == ids[places]).view(-1, k).long().cumprod(-1).sum(-1).tolist())
    return DraftAcceptance(rows)
