"""Files of targets and heads: config.json, and safetensors with a header but no contents."""

import json
import struct

import torch
from safetensors.torch import save_file

from engine.config import ModelConfig
from engine.models.registry import open_model


def source_of(path, settings, **shapes):
    """A model's directory; its tensors are holes in a file, however large."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for number in shape:
            size *= number
        header[name], end = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}, end + size
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return open_model(ModelConfig(str(path)))


def target_of(path, *, layers, hidden, vocab):
    settings = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocab}
    return source_of(path, settings | {"num_attention_heads": 8, "eos_token_id": 1})


LAYERS = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
LAYERS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 500.0}


def head_settings(verifier=None, **fields):
    """The config.json of an EAGLE-3 head in the form of `speculators`, for a target of `save_llama`."""
    settings = {"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": verifier}}}
    settings |= {"draft_vocab_size": 64, "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [2, 1]}
    return settings | {"transformer_layer_config": LAYERS} | fields


def head_tensors(*, draft_vocab=64, hidden=32, width=32, seed=3):
    """Random weights under the names of `speculators`."""
    torch.manual_seed(seed)
    layer = "layers.0."
    shapes = {f"{layer}self_attn.{name}_proj": (size, 2 * hidden) for name, size in (("q", 32), ("k", 16), ("v", 16))}
    shapes |= {f"{layer}mlp.{name}_proj": (48, hidden) for name in ("gate", "up")}
    shapes |= {"fc": (hidden, 2 * width), f"{layer}self_attn.o_proj": (hidden, 32), "lm_head": (draft_vocab, hidden)}
    norms = [f"{layer}{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    shapes |= dict.fromkeys([*norms, "norm"], (hidden,)) | {f"{layer}mlp.down_proj": (hidden, 48)}
    return {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}


def save_head(path, settings, tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "model.safetensors")
    return str(path)
