"""Starts a block head from a trained draft model: it takes over the draft's layers, and learns to read the target.

The draft's keys and values at a place are nearly linear in the outputs of the target's layers there. So `fc` begins as
the least-squares map from these to vectors whose keys and values are the draft's. The bundled head learned more in its
first 90 steps from the bundled draft than in 2,000 from random weights.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.heads.head import Head
from engine.training.checkpoint import TrainingError
from engine.training.heads.unroll import read_target

_RIDGE = 1e-2
_SMALLEST = 0.02
"""Keys and values that depend less than this on a vector, relative to others, are not fitted."""


@torch.no_grad()
def start_from(head: Head, draft: PreTrainedModel, target: PreTrainedModel, token_ids: Tensor) -> None:
    """Fill a new head of the draft's sizes, on some texts [texts, length]; raise TrainingError if it cannot."""
    decoder: Any = draft.get_decoder()  # type: ignore[no-untyped-call]
    layers, own = list(decoder.layers), list(head.get_submodule("layers").children())
    if draft.config.model_type != "llama" or draft.config.attention_bias or not head.drafts_blocks:
        raise TrainingError(f"a {head.config.kind} head cannot start from a draft of type {draft.config.model_type}")
    inputs: list[Tensor] = []
    hooks = [x.input_layernorm.register_forward_hook(lambda *call: inputs.append(call[2])) for x in layers]
    draft(input_ids=token_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    taps, _ = read_target(target, head.config.taps, token_ids)
    features = torch.cat(taps, -1).flatten(0, 1)
    projections = [torch.cat([x.self_attn.k_proj.weight, x.self_attn.v_proj.weight]) for x in layers]
    outputs = torch.cat([u.flatten(0, 1) @ w.T for u, w in zip(inputs, projections, strict=True)], -1)
    ridge = _RIDGE * len(features) * torch.eye(features.shape[1], device=features.device)
    fitted = torch.linalg.solve(features.T @ features + ridge, features.T @ outputs)
    fc = torch.linalg.pinv(torch.cat(projections), rtol=_SMALLEST) @ fitted.T
    head.get_parameter("fc.weight").copy_(fc)
    head.get_parameter("hidden_norm.weight").fill_(float((features @ fc.T).square().mean(-1).sqrt().mean()))
    head.get_parameter("norm.weight").copy_(decoder.norm.weight)
    for layer, mine, hidden in zip(layers, own, inputs, strict=True):
        mine.load_state_dict(layer.state_dict(), strict=False)
        normed: Any = mine.self_attn
        for name in ("q", "k"):
            projected = getattr(layer.self_attn, f"{name}_proj")(hidden)
            getattr(normed, f"{name}_norm").weight.fill_(float(projected.square().mean().sqrt()))
