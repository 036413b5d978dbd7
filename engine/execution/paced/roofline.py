"""Roofline: how long a forward pass takes on given hardware; pure functions over rows, tokens and contexts.

A pass reads its weights and its rows' keys and values once, and multiplies; the slower of the two bounds it (Williams,
Waterman and Patterson, "Roofline"). Added to this are two all-reduces per layer where a model is spread over several
GPUs, and a constant. Assumed away: the time to write keys and values, activations that do not stay in the caches, and
that real kernels rarely reach both bounds at once.
"""

from dataclasses import dataclass

from engine.execution.paced.parameters import ALL_REDUCES_PER_LAYER, BYTES, PASS_S, Hardware, Model


@dataclass(frozen=True, slots=True)
class Work:
    """What one pass computes.

    Attributes:
        num_tokens: tokens of all rows.
        num_logits: tokens whose logits are computed.
        num_context_tokens: tokens whose keys and values are read, over all rows.
        num_attended: places that tokens attend to, over all tokens.
    """

    num_tokens: int
    num_logits: int
    num_context_tokens: int
    num_attended: int


def decoding(num_rows: int, num_tokens_per_row: int, context: int) -> Work:
    """Return the work of a pass over rows of equal context that each compute some tokens and all their logits."""
    num_tokens = num_rows * num_tokens_per_row
    return Work(num_tokens, num_tokens, num_rows * context, num_tokens * context)


def pass_seconds(work: Work, model: Model, hardware: Hardware, num_gpus: int) -> float:
    """Return the time of one pass of a model over `num_gpus` tensor-parallel GPUs."""
    head_weights = model.head_weights if work.num_logits else 0.0
    kv_bytes = 2 * BYTES * model.layers * model.kv_size * work.num_context_tokens
    num_bytes = BYTES * (model.layer_weights + head_weights) + kv_bytes
    products = model.layer_weights * work.num_tokens + model.head_weights * work.num_logits
    attention = 2 * model.layers * model.hidden_size * work.num_attended  # scores, and their weighted values
    reading_s = num_bytes / num_gpus / hardware.bytes_per_s
    arithmetic_s = 2 * (products + attention) / num_gpus / hardware.flops
    return PASS_S + max(reading_s, arithmetic_s) + _all_reduce_seconds(work, model, hardware, num_gpus)


def _all_reduce_seconds(work: Work, model: Model, hardware: Hardware, num_gpus: int) -> float:
    """Return the time of all all-reduces of a pass; each moves 2 (n - 1) / n of its tensor per GPU."""
    if num_gpus == 1:
        return 0.0
    moved = BYTES * work.num_tokens * model.hidden_size * 2 * (num_gpus - 1) / num_gpus
    each_s = hardware.all_reduce_s + moved / hardware.link_bytes_per_s
    return ALL_REDUCES_PER_LAYER * model.layers * each_s
