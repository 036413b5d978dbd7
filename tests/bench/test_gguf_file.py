"""A GGUF file has the weights of the model, named and ordered as llama.cpp wants them."""

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, MistralConfig
from transformers.models.llama.modeling_llama import rotate_half

from engine.config import BUNDLED_DRAFT
from tests.bench import with_llama_cpp
from tests.bench.gguf_file import interleaved, tensor_name, write_gguf


def test_every_weight_of_the_bundled_draft_is_written_bit_for_bit(tmp_path: Path) -> None:
    write_gguf(BUNDLED_DRAFT, tmp_path / "draft.gguf", torch.float32)
    weights = load_file(BUNDLED_DRAFT / "model.safetensors")
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "draft.gguf").tensors}
    assert written.keys() == {tensor_name(name) for name in weights}
    heads = {"q_proj": 5, "k_proj": 1}
    for name, weight in weights.items():
        expected = weight.float()
        for part, count in heads.items():
            if part in name:
                expected = interleaved(expected, count)
        found = torch.from_numpy(written[tensor_name(name)].data.copy())
        assert torch.equal(found.view(expected.shape), expected)


def test_rotating_neighbours_of_the_interleaved_order_is_rotating_halves() -> None:
    states = torch.arange(2 * 8.0).unsqueeze(1)  # [heads * head_dim, 1]

    def rotate_neighbours(x: Tensor) -> Tensor:
        pairs = x.view(-1, 2)
        return torch.stack([-pairs[:, 1], pairs[:, 0]], -1).view(-1, 1)

    halves = rotate_half(states.view(2, 8)).reshape(-1, 1)
    assert torch.equal(rotate_neighbours(interleaved(states, 2)), interleaved(halves, 2))


@pytest.mark.parametrize(
    "config",
    [MistralConfig(), LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})],
)
def test_a_model_that_it_cannot_write_is_refused(config: LlamaConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="only plain llama is written"):
        write_gguf(tmp_path, tmp_path / "model.gguf", torch.float32)


def test_without_a_server_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_llama_cpp, "BINARY", "llama-server-that-is-not-there")
    assert with_llama_cpp.reason_to_skip() == "there is no llama-server-that-is-not-there on the path"
    monkeypatch.setattr(with_llama_cpp, "BINARY", "sh")
    assert with_llama_cpp.reason_to_skip() is None
