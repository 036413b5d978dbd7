"""Grouped experts compute what transformers' own do; no bit depends on the batch."""

from types import SimpleNamespace

import torch
import transformers

from engine.models.layers.experts import compute_experts
from tests.engine.tiny import EXPERTS, LATENT, SIZES, backend_of, save


def experts(num_experts=3, size=1):
    """Experts whose results are their number's weight, exactly."""
    return SimpleNamespace(
        num_experts=num_experts,
        has_gate=False,
        has_bias=False,
        is_transposed=False,
        has_post_expert_norm=False,
        act_fn=lambda inner: inner,
        up_proj=torch.ones(num_experts, size, size),
        down_proj=torch.tensor([1.0, 1e8, -1e8])[:, None, None].expand(num_experts, size, size),
    )


def test_a_tokens_results_are_added_in_order_of_experts():
    """1 + 1e8 - 1e8 is 0 in order of experts, and 1 in the order of the router's choice."""
    found = compute_experts(experts(), torch.ones(1, 1), torch.tensor([[2, 1, 0]]), torch.ones(1, 3))
    assert found.item() == 0.0
    found = compute_experts(experts(), torch.ones(1, 1), torch.tensor([[0, 2, 1]]), torch.tensor([[0.5, 2.0, 1.0]]))
    assert found.item() == -1e8, "weights follow their experts"


def test_what_transformers_keeps_in_float32_stays_so(tmp_path):
    config = transformers.DeepseekV3Config(**SIZES | EXPERTS | LATENT | {"num_hidden_layers": 2})
    gate = backend_of(save(config, tmp_path), dtype="bfloat16").model.module.model.layers[1].mlp.gate
    assert (gate.e_score_correction_bias.dtype, gate.weight.dtype) == (torch.float32, torch.bfloat16)
