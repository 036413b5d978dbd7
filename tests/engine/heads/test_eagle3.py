"""EAGLE-3 heads: their logits are those of the formulas, and their drafts leave no trace."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config

from engine.protocols import Draft, run_in_process
from tests.engine.heads.tiny_heads import backend_with_head, head_config, make_verifier, tapped, verify_row

VARIANTS = {
    "plain": {},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True, "fc_bias": True},
    "3.1": {"fc_norm": True, "norm_output": True},
    "two layers": {"layers": 2, "kv_heads": 2, "norm_before_residual": True},
    "qwen3": {"like": Qwen3Config},
    "a window": {"layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "draft vocabulary": {"draft_vocab": 20},
}
TEXT = [5, 9, 2, 7, 30, 12, 44, 8, 3, 21, 17]


def rms(x, norm):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight


def rotated(x, positions, theta):
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)


def dense_logits(head, taps, tokens, drafted):
    """The logits after each of `drafted`, by the formulas of EAGLE-3 in dense form, from the first pair on."""
    config, layers = head.config, head.config.layers
    if config.fc_norm:
        taps = [rms(tap, norm) for tap, norm in zip(taps, head.fc_norm, strict=True)]
    joined = torch.cat(taps, -1)
    if config.norm_before_fc:
        joined = rms(joined, head.input_norm)
    states = list(F.linear(joined, head.fc.weight, head.fc.bias))
    heads, kv_heads, dim = layers.num_attention_heads, layers.num_key_value_heads, layers.head_dim
    logits = []
    for step in range(len(drafted) + 1):
        text = [*tokens, *drafted[:step]]
        positions = torch.arange(1, len(text), dtype=torch.float32)
        hidden = torch.stack(states)
        for i, layer in enumerate(head.layers):
            residual = hidden
            if i == 0:
                normed = rms(hidden, layer.hidden_norm)
                residual = normed if config.norm_before_residual else hidden
                embedded = head.embed_tokens.weight[torch.tensor(text[1:])]
                joined = torch.cat([rms(embedded, layer.input_layernorm), normed], -1)
            else:
                joined = rms(hidden, layer.input_layernorm)
            parts = [F.linear(joined, getattr(layer.self_attn, f"{name}_proj").weight) for name in "qkv"]
            query, key, value = (part.view(len(joined), -1, dim).transpose(0, 1) for part in parts)
            if hasattr(layer.self_attn, "q_norm"):
                query, key = rms(query, layer.self_attn.q_norm), rms(key, layer.self_attn.k_norm)
            query, key = (rotated(one, positions, layers.rope_parameters["rope_theta"]) for one in (query, key))
            key, value = (one.repeat_interleave(heads // kv_heads, 0) for one in (key, value))
            distance, types = positions[:, None] - positions, getattr(layers, "layer_types", None) or [""] * (i + 1)
            window = layers.sliding_window if types[i] == "sliding_attention" else len(positions)
            visible = (distance >= 0) & (distance < window)
            mixed = F.scaled_dot_product_attention(query, key, value, visible).transpose(0, 1).flatten(1)
            hidden = residual + F.linear(mixed, layer.self_attn.o_proj.weight)
            normed, mlp = rms(hidden, layer.post_attention_layernorm), layer.mlp
            gated = F.silu(F.linear(normed, mlp.gate_proj.weight)) * F.linear(normed, mlp.up_proj.weight)
            hidden = hidden + F.linear(gated, mlp.down_proj.weight)
        last = rms(hidden[-1], head.norm)
        states.append(last if config.norm_output else hidden[-1])
        logits.append(F.linear(last, head.lm_head.weight))
    return torch.stack(logits)


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_the_drafts_are_those_of_the_formulas_whatever_the_chunks(target_path, name):
    backend = backend_with_head(target_path, head_config(**VARIANTS[name]))
    head = backend.model.head
    verifier, row = make_verifier(backend), verify_row(TEXT, 4)
    for start, end in ((0, 4), (4, 6), (6, row.start)):
        run_in_process(verifier.verify([replace(row, start=start, length=end - start, draft=Draft())]))
    (verdict,) = run_in_process(verifier.verify([row]))
    drafted = verdict.draft.token_ids
    assert len(drafted) == 4
    expected = dense_logits(head, tapped(backend, TEXT[:-1]), TEXT, drafted[:-1])
    ids = expected.argmax(-1)
    assert drafted == (ids if head.target_ids is None else head.target_ids[ids]).tolist()


def test_a_targets_logit_scale_and_cap_are_the_heads(target_path):
    head = backend_with_head(target_path, head_config(logit_scale=0.25, logit_cap=2.0)).model.head
    hidden = torch.randn(3, 32)
    expected = 2.0 * torch.tanh(0.25 * head.lm_head(hidden) / 2.0)
    torch.testing.assert_close(head.vocab_logits(hidden), expected)
