"""A plain baseline: the same random model decoded by torch.compile with cuBLAS and flash attention, one request.

Its KV cache is static and its decoding passes are CUDA graphs (`mode="reduce-overhead"`); prompts run eagerly. Nothing
is paged, drafted or made independent of the batch.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.gpu.models import random_module
from tests.gpu.passes import dtype_of_passes, median_seconds

Cache = list[tuple[Tensor, Tensor]]


def baseline(device: str, shape: str, *, context: int, prompts: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield the time of a decoding pass over one token, and of prompts."""
    module: Any = random_module(shape, torch.device(device), dtype_of_passes(device)).eval().requires_grad_(False)
    config = module.config
    size = (1, config.num_key_value_heads, max(context + 1, *prompts), config.head_dim)
    like = module.lm_head.weight
    cache = [(like.new_zeros(size), like.new_zeros(size)) for _ in module.model.layers]
    forward = _forward
    if device == "cuda":
        for tensor in itertools.chain.from_iterable(cache):
            torch._dynamo.mark_static_address(tensor)  # else no graph is recorded: a pass changes it
        forward = torch.compile(_forward, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        token, place = (torch.full((1, 1), number, device=device) for number in (7, context))
        seconds = median_seconds(lambda: forward(module, cache, token, place, end=context + 1), device)
        yield {"cell": f"{shape}: 1 x 1 token at {context}", "pass_ms": round(seconds * 1e3, 3)}
        for length in prompts:
            tokens = torch.full((1, length), 7, device=device)
            places = torch.arange(length, device=device).unsqueeze(0)
            seconds = median_seconds(lambda t=tokens, p=places, n=length: _forward(module, cache, t, p, end=n), device)  # type: ignore[misc]
            yield {"cell": f"{shape}: a prompt of {length}", "pass_ms": round(seconds * 1e3, 3)}


def _forward(module: Any, cache: Cache, token_ids: Tensor, positions: Tensor, *, end: int) -> Tensor:
    """Return the most likely next token; the tokens [1, n] are the last before `end`."""
    model = module.model
    x = model.embed_tokens(token_ids)
    cos, sin = model.rotary_emb(x, positions)
    for layer, (keys, values) in zip(model.layers, cache, strict=True):
        attention, h = layer.self_attn, layer.input_layernorm(x)
        query, key, value = (
            projection(h).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        keys.index_copy_(2, positions[0], key)
        values.index_copy_(2, positions[0], value)
        is_prompt = token_ids.shape[1] > 1
        mixed = F.scaled_dot_product_attention(
            query, keys[:, :, :end], values[:, :, :end], is_causal=is_prompt, enable_gqa=True
        )
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return module.lm_head(model.norm(x[:, -1:])).argmax(-1)
