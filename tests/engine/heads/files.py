"""Files of targets and heads: config.json, and safetensors with a header but no contents."""

import json
import struct

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
