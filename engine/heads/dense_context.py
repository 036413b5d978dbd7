"""DenseContext: what a head reads and writes while it runs over whole texts, in place of a KV cache.

First the head absorbs all tokens, as during the target's passes. Then drafts start at many places at once; each attends
to the tokens before its start and to its own places.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.models.first_layers import decoder_layers
from engine.models.layers.layer_attention import AttentionParams


class DenseContext:
    """An `AttentionContext` that autograd follows; states: [texts * starts * places, state_size] of the last pass."""

    def __init__(self, features: Tensor) -> None:
        """Begin with the features of all tokens, [texts, length, state_size], to be absorbed."""
        self.taps: dict[int, Tensor] = {}
        self._features = features
        self._starts = torch.zeros(len(features), 1, dtype=torch.int64, device=features.device)
        self._context: dict[int, tuple[Tensor, Tensor]] = {}
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        self.states = features.roll(1, 1).flatten(0, 1)

    def begin(self, starts: Tensor) -> None:
        """Begin drafts after the absorbed tokens; `starts`: [texts, starts] the place of each draft's first token."""
        self._context, self._written, self._starts = self._written, {}, starts
        indices = (starts - 1).unsqueeze(-1).expand(-1, -1, self._features.shape[-1])
        self.states = self._features.gather(1, indices).flatten(0, 1)

    def read_states(self, *, of_parents: bool) -> Tensor:
        return self.states if of_parents else self._features.flatten(0, 1)

    def write_states(self, states: Tensor, tokens: Tensor | None = None) -> None:
        self.states = states

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Append a pass's keys and values to earlier passes'; see `AttentionContext`."""
        new = self._by_start(key), self._by_start(value)
        if layer in self._written:
            old = self._written[layer]
            new = torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2)
        self._written[layer] = new

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attend to the context before each start, and to what has been written since; see `AttentionContext`."""
        self.write(layer, key, value)
        keys, values = self._written[layer]
        queries = self._by_start(query)
        queries = queries.view(*queries.shape[:3], keys.shape[3], -1, keys.shape[4])
        places = self._starts.unsqueeze(-1) + torch.arange(keys.shape[2], device=keys.device)
        at = places[:, :, -queries.shape[2] :]
        distances = at.unsqueeze(-1) - places.unsqueeze(2)
        seen = (places.unsqueeze(2) >= params.first) & (distances < (params.window or sys.maxsize))
        seen &= params.sees_row | (distances >= 0)
        scores = [torch.einsum("tsqhgd,tskhd->tshgqk", queries, keys)]
        masks, parts = [seen | (distances == 0)], [values]
        if layer in self._context:
            keys, values = (tensor.squeeze(1) for tensor in self._context[layer])
            slots = torch.arange(keys.shape[1], device=keys.device)
            distances = at.unsqueeze(-1) - slots
            seen = (slots < self._starts[..., None, None]) & (slots >= params.first)
            masks.insert(0, seen & (distances < (params.window or sys.maxsize)))
            scores.insert(0, torch.einsum("tsqhgd,tkhd->tshgqk", queries, keys))
            parts.insert(0, values)
        scale = params.scaling or query.shape[-1] ** -0.5
        joined = torch.cat(scores, -1).float() * scale
        weights = joined.masked_fill(~torch.cat(masks, -1)[:, :, None, None], -torch.inf).softmax(-1).to(values.dtype)
        new_weights = weights[..., weights.shape[-1] - parts[-1].shape[2] :]
        output = torch.einsum("tshgqk,tskhd->tsqhgd", new_weights, parts[-1])
        if len(parts) > 1:
            output = output + torch.einsum("tshgqk,tkhd->tsqhgd", weights[..., : parts[0].shape[1]], parts[0])
        return output.flatten(3, 4).flatten(0, 2)

    def _by_start(self, tensor: Tensor) -> Tensor:
        """Return [texts, starts, places, heads, dim] from [heads, tokens, dim]."""
        heads, _, dim = tensor.shape
        return tensor.transpose(0, 1).reshape(*self._starts.shape, -1, heads, dim)


@torch.no_grad()
def read_target(target: PreTrainedModel, taps: Sequence[int], token_ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return tapped layers' outputs, [texts, length, width] each, and the logits, for token ids [texts, length]."""
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
