import pytest
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from tests.engine.tiny import SIZES, save


@pytest.fixture(scope="session")
def mixed_path(tmp_path_factory):
    """A model whose package has both of everything.

    The first layer attends to all and has weights that are 16-bit numbers, the second attends through a window and has
    weights that are not. Heads are large enough for attention in C++.
    """
    path = tmp_path_factory.mktemp("mixed")
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 128}
    save(Qwen2Config(**sizes, use_sliding_window=True, sliding_window=24, max_window_layers=1), path, seed=1)
    weights = load_file(path / "model.safetensors")
    weights |= {name: weight.bfloat16().float() for name, weight in weights.items() if "layers.0." in name}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return str(path)
