"""A large target that computes the same function as a small one: passes read many more weights, and no text changes.

A target as small as the bundled one takes little longer for a pass than for the calls that make it up, so drafts save
it little. To see what they save a large one, decoder layers are appended whose attention and MLP add nothing, since
their last projections are zero, and every MLP is widened by channels whose way out is zero. All of these weights are
read and multiplied in every pass. Sums get more terms, all of them zero; logits differ by rounding alone.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

NUM_LAYERS = 24
INTERMEDIATE_SIZE = 28_672
"""With the bundled target's hidden size these make 0.4 billion weights."""
DESCRIPTION = (
    "The large target was made for this measurement: the small one, with layers and channels whose way out is zero. "
    "Every pass reads and multiplies all of its 0.4 billion bfloat16 weights; its texts and drafts are the small one's."
)


def make_large_target(
    target: Path, folder: Path, *, num_layers: int = NUM_LAYERS, intermediate_size: int = INTERMEDIATE_SIZE
) -> Path:
    """Write the large model of a Llama-like target, in bfloat16, and its tokenizer; return the folder."""
    config = AutoConfig.from_pretrained(target)
    generator = torch.Generator().manual_seed(0)
    small = {name: tensor for file in sorted(target.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    large = {name: _widened(name, tensor, intermediate_size, generator) for name, tensor in small.items()}
    last = f"model.layers.{config.num_hidden_layers - 1}."
    for layer in range(config.num_hidden_layers, num_layers):
        for name in [name for name in large if name.startswith(last)]:
            adds_nothing = name.endswith(("o_proj.weight", "down_proj.weight"))
            tensor = torch.zeros_like(large[name]) if adds_nothing else large[name].clone()
            large[f"model.layers.{layer}." + name.removeprefix(last)] = tensor
    config.num_hidden_layers = num_layers
    config.intermediate_size = intermediate_size
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in large.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return folder


def _widened(name: str, tensor: Tensor, intermediate_size: int, generator: torch.Generator) -> Tensor:
    """Return a weight with more MLP channels: random ways in, no way out."""
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        size, hidden = tensor.shape
        more = torch.randn(intermediate_size - size, hidden, generator=generator) * 0.02
        return torch.cat([tensor, more.to(tensor.dtype)])
    if name.endswith("down_proj.weight"):
        hidden, size = tensor.shape
        return torch.cat([tensor, torch.zeros(hidden, intermediate_size - size, dtype=tensor.dtype)], 1)
    return tensor
