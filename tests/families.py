"""Tiny random models of every architecture that generates text, with its real mix of layers.

A default configuration is shrunk by rules: by the names of its fields, and by how its layers differ.
`python -m tests.families` writes the table of families in docs/families.md, `python -m tests.families vllm`, where vLLM
is installed, the table of what it serves; `python -m tests.families templates DIR...` asks chat templates
(`tests/chat_templates.py`).
"""

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from engine.config import ModelConfig
from engine.encoder_decoder.model_kind import KINDS
from engine.errors import ModelError
from engine.models.causal_lm import CausalLM
from engine.models.families import ServedByVllm, read_configuration, refusal, text_part
from engine.models.first_layers import decoder_layers
from engine.models.layers.quantization import on_meta
from engine.models.registry import HYBRIDS, open_model
from engine.models.shards import plan_of
from tests.chat_templates import report

PAGE = Path(__file__).parents[1] / "deployments" / "docs" / "families.md"
MARKS = ("<!-- families: python -m tests.families -->\n", "<!-- end of families -->\n")
VLLM_MARKS = ("<!-- with vLLM: python -m tests.families vllm -->\n", "<!-- end of with vLLM -->\n")

RULES = {
    r"vocab_size(_per_layer_input)?|\w+_vocab_size": 64,
    r"(attention_)?hidden_size|n_embd|d_model|emb(edding)?_(size|dim)|word_embed_proj_dim|\w+put_embedding_size": 64,
    r"(\w+_)?intermediate_size(_mlp)?|(\w+_)?ffn_(dim|hidden_size)|n_inner|d_ff|dff|dim_ff|d_inner": 48,
    r"(\w+_)?attention_heads|n_heads?|num_heads|linear_num_(value_)?heads|index_n_heads": 4,
    r"(swa_)?num_(key_value|kv)_heads|linear_num_key_heads|num_global_key_value_heads": 2,
    r"(\w+_)?head_dim|kv_channels|attention_head_(size|dim)|d_head|dim_head": 16,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_(source|target)_positions": 512,
    r"sliding_window(_size)?|(attention_)?window_size|local_attention|attention_chunk_size": 8,
    r"(\w+_)?num_(local_)?experts|n_routed_experts|num_experts": 4,
    r"num_experts_per_tok|moe_topk|moe_k|n_group": 2,
    r"topk_group|first_k_dense_replace|num_dense_layers|moe_layer_start_index|\w*n(um)?_shared_experts": 1,
    r"\w+_lora_rank|laurel_rank|hidden_size_per_layer_input|adapter_rank|router_hidden_size|\w*state(_size)?": 16,
    r"v_head_dim": 12,
    r"mamba_(n_heads|num_heads)|n_mamba_heads|qk_rope_head_dim|(mamba_)?chunk_size|\w+_dt_rank|time_step_rank": 8,
    r"mamba_d_ssm": 128,
    r"(mamba_)?(n_?groups)": 2,
}
"""What fields become, by regular expressions of their names, where they are larger."""
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
SHARED = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXTRA: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": SHARED | {"intermediate_size": 48},
    "gemma4_text": SHARED,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 1, "head_dim": 8, "qk_head_dim": 24},
    "nemotron": {"num_key_value_heads": 2},
}
"""What the defaults of a family lack, or have in a form that shows less than its models."""
IDS = {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0}


def shrunk(name: str, value: int) -> int:
    sizes = [size for pattern, size in RULES.items() if re.fullmatch(pattern, name)]
    return min(value, sizes[-1]) if sizes else value


def tiny_config(model_type: str, **settings: Any) -> PreTrainedConfig:
    """Return a small configuration with the layers of the default one, as few as show all of its kinds."""
    cls = CONFIG_MAPPING[model_type]
    default = cls()
    text = default.get_text_config()
    fields = {name: vars(text).get(name, getattr(type(text), name, None)) for name in type(text).__dataclass_fields__}
    fields = {name: value for name, value in fields.items() if name not in PreTrainedConfig.__dataclass_fields__}
    sizes = {name: shrunk(name, value) for name, value in fields.items() if type(value) is int}
    sizes = {name: size for name, size in sizes.items() if size != fields[name]}
    if fields.get("kv_lora_rank"):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if fields.get("head_dim", 0) is None:
        sizes["head_dim"] = 16
    extra = EXTRA.get(model_type, {})
    num_layers = next((fields[name] for name in LAYERS if fields.get(name)), 2)
    lists = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == num_layers and isinstance(value[0], str)
    }
    count = len(extra.get("layer_types", "  "))
    while "layer_types" not in extra and any({*kinds[:count]} != {*kinds} for kinds in lists.values()):
        count += 1
    sizes |= {name: kinds[:count] for name, kinds in lists.items()} | {name: count for name in LAYERS if name in fields}
    sizes |= {**IDS, **extra, **settings}
    if text is default:
        return cls(**sizes)
    tiny = type(text)(**sizes)
    return cls(text_config=tiny.to_dict())


def table(*, with_marks: bool = True) -> str:
    """The table as deployments/docs/families.md should have it, or one that makes no model."""
    rows: dict[str, list[str]] = {"served": [], "their text part is served": []}
    num_others = 0
    for name in sorted(CONFIG_MAPPING):
        try:
            whole = read_configuration("", {"model_type": name})
        except ModelError:
            num_others += 1
            continue
        if name in KINDS:
            rows["served"].append(f"{name}°*")
        elif (reason := refusal(part := text_part(whole), rolls_back=part.model_type in HYBRIDS)) is None:
            if part is whole:
                rows["served"].append(name + "".join(marks_of(name) if with_marks else ()))
            else:
                rows["their text part is served"].append(name)
        elif name in CausalLM.loaded_by._model_mapping._model_mapping or name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
            rows.setdefault(f"refused{reason.removeprefix(part.model_type)}", []).append(name)
        else:
            num_others += 1
    lines = [f"| of transformers {transformers.__version__} | `model_type` |", "|---|---|"]
    lines += [f"| {row} ({len(names)}) | {', '.join(names)} |" for row, names in rows.items()]
    lines.append(
        f"| refused: parts of models, encoders, encoder-decoders, models that write no text | {num_others} others |"
    )
    return "\n".join(lines) + "\n\n* only on one rank; ° cannot draft for itself (`drafting=self`)\n"


def marks_of(name: str) -> Iterator[str]:
    """What a served family cannot do: a mark for each."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_config(name).save_pretrained(folder)
        source = open_model(ModelConfig(folder))
        for mark, check in {
            "°": lambda: decoder_layers(on_meta(source.configuration)),
            "*": lambda: plan_of(source, 2),
        }.items():
            try:
                check()
            except ModelError:
                yield mark


def vllm_table() -> str:
    """The table of what is served with `execution=vllm`: what vLLM's registry names, and keeps no states."""
    import vllm
    from vllm.model_executor.models import registry

    supported = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}
    supported |= {*registry._TRANSFORMERS_SUPPORTED_MODELS}
    supported -= {"DiffusionGemmaForBlockDiffusion"}  # which writes no text token by token
    served, parts = "served", "their text part is served"
    refused = "refused, for layers with states or caches of their own"
    rows: dict[str, list[str]] = {served: [], parts: [], refused: []}
    for name in sorted(CONFIG_MAPPING):
        causal, multimodal = (
            supported & {*([names] if isinstance(names := mapping.get(name, ()), str) else names)}
            for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
        )
        if not causal | multimodal:
            continue
        configuration = read_configuration("", {"model_type": name})
        try:
            ServedByVllm().check(ModelConfig(name), configuration, {})
            is_refused = configuration.get_text_config().model_type in HYBRIDS  # some defaults lack such layers
        except ModelError:
            is_refused = True
        rows[refused if is_refused else parts if multimodal else served].append(name)
    lines = [f"| of vLLM {vllm.__version__} with transformers {transformers.__version__} | `model_type` |", "|---|---|"]
    return "\n".join(lines + [f"| {row} ({len(names)}) | {', '.join(names)} |" for row, names in rows.items()]) + "\n"


def listed() -> tuple[str, list[str]]:
    """The table in deployments/docs/families.md, and the decoder-only families that it lists as served."""
    content = PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    names = content.partition("| served")[2].partition("|")[2].partition("|")[0]
    return content, [name for name in re.findall(r"[\w.-]+", names) if name not in KINDS]


if __name__ == "__main__":
    if sys.argv[1:2] == ["templates"]:
        for line in report(sys.argv[2:]):
            print(line)  # noqa: T201
        sys.exit("WRONG" in line and not line.endswith(" 0 WRONG"))
    marks, written = (VLLM_MARKS, vllm_table()) if sys.argv[1:] == ["vllm"] else (MARKS, table())
    before, rest = PAGE.read_text().split(marks[0])
    PAGE.write_text(before + marks[0] + written + marks[1] + rest.split(marks[1])[1])
