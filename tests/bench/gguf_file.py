"""Writes a Llama model as GGUF, llama.cpp's format: the same weights in the same number format, and its vocabulary.

Prompts are sent as token ids, so the vocabulary only has to turn ids into text, and the way text is split before its
merges does not matter.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FORMATS = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


def write_gguf(model: Path, path: Path, dtype: torch.dtype) -> None:
    """Write the model of a transformers directory.

    Raises:
        RuntimeError: it is no Llama model, or one with scaled positions.
    """
    config = AutoConfig.from_pretrained(model)
    rope = config.rope_parameters
    if config.model_type != "llama" or rope["rope_type"] != "default":
        raise RuntimeError(
            f"{model} is {config.model_type} with {rope['rope_type']} positions; only plain llama is written"
        )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, json.loads((model / "tokenizer.json").read_text()), config)
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if not (name == "lm_head.weight" and config.tie_word_embeddings):
                _add_tensor(writer, name, tensor, config, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_name(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    layer, _, kind = name.rpartition(".")
    if layer in NAMES:
        return f"{NAMES[layer]}.{kind}"
    _, _, index, part = layer.split(".", 3)
    return f"blk.{index}.{LAYER_NAMES[part]}.{kind}"


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, config: Any, dtype: torch.dtype) -> None:
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if part in name:
            tensor = interleaved(tensor, heads)
    if tensor.dim() == 1:  # llama.cpp adds and scales in float32
        dtype = torch.float32
    tensor = tensor.to(dtype).contiguous()
    data = (tensor.view(torch.uint8) if dtype == torch.bfloat16 else tensor).numpy()
    writer.add_tensor(tensor_name(name), data, raw_dtype=FORMATS[dtype])


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Order a projection's outputs [heads * head_dim, ...] as llama.cpp rotates them.

    It rotates neighbours, transformers rotates the halves of a head.
    """
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: Any) -> None:
    control = {token["id"] for token in tokenizer["added_tokens"]}
    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    texts |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    ids = range(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(token_id, f"<unused {token_id}>") for token_id in ids])
    writer.add_token_types([_kind(token_id, texts, control) for token_id in ids])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_add_bos_token(False)
    if config.eos_token_id is not None:
        writer.add_eos_token_id(config.eos_token_id)


def _kind(token_id: int, texts: dict[int, str], control: set[int]) -> gguf.TokenType:
    if token_id not in texts:
        return gguf.TokenType.UNUSED
    return gguf.TokenType.CONTROL if token_id in control else gguf.TokenType.NORMAL
