"""Tensor-parallel plans: which layers are sliced over ranks and how, by patterns of their names in the decoder.

They are transformers' own, with entries that these lack, by `model_type`. Attention is sliced by heads. Where
transformers gathers the heads again, because a norm runs over all of them, every rank holds attention whole: it is a
small part of the weights, and that needs no communication.
"""

from collections.abc import Mapping

from transformers import PreTrainedConfig

COLUMNS, ROWS, PACKED_COLUMNS, PACKED_ROWS, EXPERTS = (
    *("colwise", "rowwise", "packed_colwise", "packed_rowwise", "moe_tp_experts"),
)
WHOLE = {
    *("replicated", "replicated_with_grad_allreduce", "embedding_rowwise", "mla_kv_a_proj", "local_params"),
    *("colwise_gather_output", "rowwise_split_input"),
}
"""Styles of layers that every rank holds whole; embeddings are only looked up."""

_HEADS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "sinks"), COLUMNS)
_ATTENTION = {f"layers.*.self_attn.{name}": style for name, style in (_HEADS | {"o_proj": ROWS}).items()}
_LAYERS = {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS}
_DENSE, _SHARED = (
    {f"layers.*.{block}.{name}": style for name, style in _LAYERS.items()} for block in ("mlp", "shared_*")
)
_FUSED = {"layers.*.mlp.gate_up_proj": PACKED_COLUMNS, "layers.*.mlp.down_proj": ROWS}
_MORE: Mapping[str, Mapping[str, str]] = {
    "afmoe": _ATTENTION | _DENSE | _SHARED,
    **dict.fromkeys(("axk1", "deepseek_v3", "granitemoe", "granitemoeshared", "phimoe", "youtu"), _ATTENTION),
    **dict.fromkeys(("glm", "glm4", "phi3"), _FUSED),
    "glm4_moe_lite": _ATTENTION | _SHARED,
    "gpt_oss": _ATTENTION | {"layers.*.mlp.experts": EXPERTS},
    "hunyuan_v1_moe": _ATTENTION | _SHARED,
    **dict.fromkeys(("qwen2_moe", "solar_open"), _SHARED),
}


def tp_plan(config: PreTrainedConfig) -> dict[str, str]:
    """Return the styles of a model's layers by patterns of their names in the decoder; empty without a plan."""
    return {**(config.base_model_tp_plan or {}), **_MORE.get(config.model_type, {})}


def splits_heads(config: PreTrainedConfig) -> bool:
    """Return whether a rank attends with a part of the heads."""
    return any(style == COLUMNS and "att" in name for name, style in tp_plan(config).items())
