"""Published models without their weights: their settings, and the shapes that their files have."""

import json
from pathlib import Path
from typing import Any

from engine.config import ModelConfig
from engine.models.registry import open_model
from engine.models.source import ModelSource

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
LLAMA_70B = _LLAMA | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
LLAMA_70B |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28672, "tie_word_embeddings": False}
LLAMA_8B = _LLAMA | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "tie_word_embeddings": False}
LLAMA_1B = _LLAMA | {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA_1B |= {"num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "tie_word_embeddings": True}


def published(folder: Path, settings: dict[str, Any], **options: Any) -> ModelSource:
    """Return a Llama with these settings, whose files are not read; `options` are those of a ModelConfig."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    source = open_model(ModelConfig(str(folder), **options))
    source.weight_shapes = llama_shapes(settings)
    return source


def llama_shapes(settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's tensors."""
    hidden, inner, size = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    heads, kv_heads = settings["num_attention_heads"] * size, settings["num_key_value_heads"] * size
    layer = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (settings["vocab_size"], hidden)}
    for number in range(settings["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (settings["vocab_size"], hidden)
    return shapes
