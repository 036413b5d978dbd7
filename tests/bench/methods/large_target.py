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
from transformers import AutoConfig, AutoTokenizer, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

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


def make_hybrid_target(large: Path, folder: Path) -> Path:
    """Write a large target with a linear layer in place of each layer that adds nothing; return the folder.

    The state of its Mamba-2 layers takes 0.7 % of the weights' bytes, as in Nemotron-H. They add nothing either, but
    every pass computes them, and reads and writes the states.
    """
    config, weights = AutoConfig.from_pretrained(large), load_file(large / "model.safetensors")
    attends = [
        bool(weights[f"model.layers.{i}.self_attn.o_proj.weight"].any()) for i in range(config.num_hidden_layers)
    ]
    hybrid = GraniteMoeHybridConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        shared_intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=config.rope_parameters,
        position_embedding_type="rope",
        attention_multiplier=config.head_dim**-0.5,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=config.eos_token_id,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=["full_attention", "linear_attention"] * (config.num_hidden_layers // 2),
        mamba_n_heads=15,
        mamba_d_state=128,
        mamba_expand=5,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    model = GraniteMoeHybridForCausalLM(hybrid).to(torch.bfloat16)
    state = model.state_dict()
    sources = [i for i, adds in enumerate(attends) if adds] + [i for i, adds in enumerate(attends) if not adds]
    places = [*range(0, len(sources), 2), *range(1, len(sources), 2)]  # those that add something attend
    for source, place in zip(sources, places, strict=True):
        old, new = f"model.layers.{source}.", f"model.layers.{place}."
        ways_in = [weights[f"{old}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        state[f"{new}shared_mlp.input_linear.weight"].copy_(torch.cat(ways_in))
        state[f"{new}shared_mlp.output_linear.weight"].copy_(weights[f"{old}mlp.down_proj.weight"])
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            state[new + name].copy_(weights[old + name])
        for name in (name for name in state if name.startswith(f"{new}self_attn.")):
            state[name].copy_(weights[old + name.removeprefix(new)])
        if f"{new}mamba.out_proj.weight" in state:
            state[f"{new}mamba.out_proj.weight"].zero_()
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        state[name].copy_(weights[name])
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(large).save_pretrained(folder)
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
