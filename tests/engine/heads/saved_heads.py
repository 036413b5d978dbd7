"""Heads as directories on disk."""

import json

from safetensors.torch import save_file

from tests.engine.heads.tiny_heads import head_config, random_head
from tests.engine.tiny import model_of


def save_head(path, target_path, *, seed=7):
    """Write a random EAGLE-3 head for a tiny target, in the form of `speculators`."""
    config = head_config(taps=(1, 2), norm_before_residual=True)
    head = random_head(model_of(target_path), config, seed=seed)
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    layers = {name: getattr(config.layers, name) for name in (*fields, "head_dim", "vocab_size")}
    settings = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "transformer_layer_config": layers | {"model_type": "llama", "rope_theta": 500.0},
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    shared = ("embed_tokens.", "lm_head.")
    save_file({k: v for k, v in head.state_dict().items() if not k.startswith(shared)}, path / "model.safetensors")
    return str(path)
