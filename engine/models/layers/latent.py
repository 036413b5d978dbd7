"""Latent attention: each token is cached as its latent and its rotated key, once for all heads.

The projections from latents to keys and values are absorbed into queries and outputs (DeepSeek-V2, arXiv:2405.04434,
section 2.1.2). Every row is computed in this form, so texts do not depend on how tokens are cut into passes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ModelError

EXPANDING = "kv_b_proj"
"""The layer that expands latents; its weights stay floats in a quantised model."""


class LatentProjection(nn.Module):
    """Replaces the layer that expands latents; keys: [heads, plain size, rank], values: [heads, rank, value_dim]."""

    def __init__(self, expand: nn.Module, key_dim: int, value_dim: int, like: Tensor) -> None:
        """Read the weights from the layer's results for unit vectors, in whatever format; `like` is [rank]."""
        super().__init__()
        unit_vectors = torch.eye(len(like), dtype=like.dtype, device=like.device)
        weights = expand(unit_vectors).view(len(like), -1, key_dim + value_dim)
        keys, values = weights.tensor_split([key_dim], -1)
        self.keys = nn.Parameter(keys.permute(1, 2, 0).contiguous(), requires_grad=False)
        self.values = nn.Parameter(values.transpose(0, 1).contiguous(), requires_grad=False)

    def query(self, query: Tensor) -> Tensor:
        """Return queries over latents, [heads, tokens, rank + rotary], given queries over expanded keys."""
        plain, rotated = query.tensor_split([self.keys.shape[1]], -1)
        return torch.cat([plain @ self.keys, rotated], -1)

    def output(self, latents: Tensor) -> Tensor:
        """Return [tokens, heads, value_dim] for the weighted sums of cached entries, [tokens, heads, any]."""
        return (latents[..., : self.values.shape[1]].transpose(0, 1) @ self.values).transpose(0, 1)


def cache_latents(module: nn.Module) -> None:
    """Let latent attention hand latents to the attention function; raise ModelError if a layer cannot expand them."""
    layers: list[Any] = [child for child in module.modules() if getattr(child, "kv_lora_rank", None)]
    for child in layers:
        if not hasattr(child, "expand_kv"):
            raise ModelError(f"{type(child).__name__} has latents, but transformers gives no access to them")
        sizes = (child.qk_nope_head_dim, child.v_head_dim, child.kv_a_layernorm.weight)
        child.latents = LatentProjection(getattr(child, EXPANDING), *sizes)
        delattr(child, EXPANDING)
        child.expand_kv = _joined


def _joined(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the values to cache, which are the same numbers."""
    joined = torch.cat([latent, rotated], -1)
    return joined, joined
