"""Latent attention: each token is cached as its latent and its rotated key, once for all heads.

The projections from latents to a head's keys and values are absorbed: a query is projected to the latents' size before
attention, and the weighted sum of latents to the size of values behind it (DeepSeek-V2, arXiv:2405.04434, section
2.1.2). Every row is computed in this form, so that no text depends on how its tokens are cut into passes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ModelError

EXPANDING = "kv_b_proj"
"""The layer that expands latents, whose weights are floats in a quantised model, too."""


class LatentProjection(nn.Module):
    """Takes the place of the layer that expands latents.

    Attributes:
        keys: [heads, size of a key without its rotated part, rank]; values: [heads, rank, value_dim].
    """

    def __init__(self, expand: nn.Module, key_dim: int, value_dim: int, like: Tensor) -> None:
        """Read the weights as the layer's results for unit vectors, whatever it stores; `like` is [rank]."""
        super().__init__()
        unit_vectors = torch.eye(len(like), dtype=like.dtype, device=like.device)
        weights = expand(unit_vectors).view(len(like), -1, key_dim + value_dim)
        keys, values = weights.tensor_split([key_dim], -1)
        self.keys = nn.Parameter(keys.permute(1, 2, 0).contiguous(), requires_grad=False)
        self.values = nn.Parameter(values.transpose(0, 1).contiguous(), requires_grad=False)

    def query(self, query: Tensor) -> Tensor:
        """Return queries of latents and rotated keys, [heads, tokens, rank + rotary], for those of expanded keys."""
        plain, rotated = query.tensor_split([self.keys.shape[1]], -1)
        return torch.cat([plain @ self.keys, rotated], -1)

    def output(self, latents: Tensor) -> Tensor:
        """Return [tokens, heads, value_dim] for the weighted sums of cached entries, [tokens, heads, any]."""
        return (latents[..., : self.values.shape[1]].transpose(0, 1) @ self.values).transpose(0, 1)


def cache_latents(module: nn.Module) -> None:
    """Let a loaded model's latent attention hand latents to the attention function; other models are left as they are.

    Raises:
        ModelError: a layer with latents has no method that expands them.
    """
    layers: list[Any] = [child for child in module.modules() if getattr(child, "kv_lora_rank", None)]
    for child in layers:
        if not hasattr(child, "expand_kv"):
            raise ModelError(f"{type(child).__name__} has latents, but transformers gives no access to them")
        sizes = (child.qk_nope_head_dim, child.v_head_dim, child.kv_a_layernorm.weight)
        child.latents = LatentProjection(getattr(child, EXPANDING), *sizes)
        delattr(child, EXPANDING)
        child.expand_kv = _joined


def _joined(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is cached of tokens as their keys, and as their values, which are the same numbers."""
    joined = torch.cat([latent, rotated], -1)
    return joined, joined
