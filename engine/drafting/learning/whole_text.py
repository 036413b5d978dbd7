"""WholeText: attention over one whole text without a cache, which gradients pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ModelError
from engine.models.layers.layer_attention import AttentionParams


class WholeText:
    """An `AttentionContext` in which every token of a pass attends to itself and the tokens before it."""

    def __init__(self) -> None:
        self.taps: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attend; see `AttentionContext.attend`. Raise ModelError if the layer attends in another way than usual."""
        if params != AttentionParams(params.window, params.scaling):
            raise ModelError("its attention has softcaps, sinks, chunks or masks of its own")
        places = torch.arange(query.shape[1], device=query.device)
        distance = places.unsqueeze(-1) - places
        mask = (distance >= 0) & (distance < (params.window or len(places)))
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        output = F.scaled_dot_product_attention(query, key, value, mask, scale=params.scaling, enable_gqa=True)
        return output[0].transpose(0, 1)

    def __getattr__(self, name: str) -> Any:
        raise ModelError(f"its layers need `{name}` of a cache")
