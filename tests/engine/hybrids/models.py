"""Settings of tiny models with linear layers, each with every kind of layer that its family mixes, by class name."""

from tests.engine.tiny import EXPERTS, HEADS, LATENT, SIZES

_MIX = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
_CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
_DELTA = _MIX | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MAMBA = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}

HYBRIDS = {
    "Qwen3Next": _DELTA | HEADS | EXPERTS,
    "Qwen3_5Text": _DELTA | HEADS,
    "Qwen3_5MoeText": _DELTA | HEADS | EXPERTS,
    "OlmoHybrid": _DELTA,
    "KimiLinear": _MIX | LATENT | EXPERTS | {"linear_num_heads": 2, "linear_head_dim": 8},
    "BailingHybrid": _MIX | LATENT | EXPERTS | {"head_dim": 8},
    "NemotronH": EXPERTS
    | HEADS
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 16,
    },
    "GraniteMoeHybrid": _MAMBA | _MIX | EXPERTS,
    "Bamba": _MAMBA | {"attn_layer_indices": [1, 3]},
    "FalconH1": _MAMBA | {"num_hidden_layers": 3, "mamba_d_ssm": 64},
    "Zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "chunk_size": 8,
        "adapter_rank": 4,
    },
    "Lfm2": _CONVOLUTIONS,
    "Lfm2Moe": _CONVOLUTIONS | EXPERTS | {"num_dense_layers": 1},
    "Lfm3": HEADS
    | {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        "sliding_window": 6,
    },
}

BAMBA = SIZES | HYBRIDS["Bamba"] | {"num_hidden_layers": 2, "attn_layer_indices": [1]}
"""A layer of Mamba 2, and a layer of attention."""
