"""Datasheets: how long a forward pass of a model takes on named GPUs.

A pass reads its weights and its rows' keys and values once, and multiplies; the slower of the two bounds it (Williams,
Waterman and Patterson, "Roofline"). Added to this are two all-reduces per layer where a model is spread over several
GPUs, and a constant. Assumed away: writing keys and values, activations that do not stay in the caches, and that real
kernels rarely reach both bounds at once. The embedding is looked up, not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Hardware(NamedTuple):
    """One GPU of a node: its datasheet (dense, 16-bit), times the share that good kernels reach.

    Attributes:
        bytes_per_s: bandwidth of its memory.
        flops: floating-point operations per second.
        link_bytes_per_s: what an all-reduce moves between GPUs per second (bus bandwidth).
        all_reduce_s: an all-reduce of few bytes, captured in a graph.
    """

    bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    all_reduce_s: float


class Model(NamedTuple):
    """A decoder with 16-bit keys and values.

    Attributes:
        layer_weights: weights of all layers, without those of experts.
        head_weights: weights of the output head, 16 bits each.
        layers, hidden_size, kv_size: number of layers, width, and key/value heads times their size.
        weight_bytes: bytes of a weight of a layer.
        expert_weights, expert_share: weights of all experts, and the part of them that a token is computed with.
    """

    layer_weights: float
    head_weights: float
    layers: int
    hidden_size: int
    kv_size: float
    weight_bytes: float = 2.0
    expert_weights: float = 0.0
    expert_share: float = 1.0


BYTES = 2
"""Bytes of an activation, a key or a value."""
PASS_S = 20e-6
"""What a pass takes besides: launching its graph and copying its tokens to the host."""
ALL_REDUCES_PER_LAYER = 2
"""After attention and after the MLP (Shoeybi et al., 1909.08053)."""

_TB_S = 0.9e12  # 3.0 of an H100's 3.35 TB/s are usual for decoding
_TFLOPS = 0.65e12  # large products reach 600 to 700 of its 989 TFLOPS
_NVLINK = 366e9 / 900  # measured with nccl-tests on four H100 (bus bandwidth), whose datasheet has 900 GB/s
_NCCL_S = 18e-6  # in a captured graph: about 3 ms for the 160 all-reduces of a 70B pass
_PCIE_4 = 32e9 * 0.8, 30e-6  # 32 GB/s each way, and an assumed latency

HARDWARE: Mapping[str, Hardware] = {
    # NVIDIA's datasheets: HGX B200, H200 and H100 SXM, A100 80 GB SXM, L40S, L4.
    "b200": Hardware(8.0 * _TB_S, 2250 * _TFLOPS, 1800 * _NVLINK, _NCCL_S),
    "h200": Hardware(4.8 * _TB_S, 989 * _TFLOPS, 900 * _NVLINK, _NCCL_S),
    "h100": Hardware(3.35 * _TB_S, 989 * _TFLOPS, 900 * _NVLINK, _NCCL_S),
    "a100": Hardware(2.039 * _TB_S, 312 * _TFLOPS, 600 * _NVLINK, _NCCL_S),
    "l40s": Hardware(0.864 * _TB_S, 362 * _TFLOPS, *_PCIE_4),
    "l4": Hardware(0.3 * _TB_S, 121 * _TFLOPS, *_PCIE_4),
}
"""By the words that name them in a paced device."""


class Work(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class Placed:
    """A model over `num_gpus` tensor-parallel GPUs of one kind."""

    model: Model
    hardware: Hardware
    num_gpus: int = 1

    def pass_seconds(self, work: Work) -> float:
        """Return the time of one pass."""
        model, hardware, num_tokens = self.model, self.hardware, work.num_tokens
        head_weights = model.head_weights if work.num_logits else 0.0
        # Experts are read if a token of the pass is computed with them; tokens choose theirs independently.
        read = model.layer_weights + model.expert_weights * (1 - (1 - model.expert_share) ** num_tokens)
        kv_bytes = 2 * BYTES * model.layers * model.kv_size * work.num_context_tokens
        reading_s = (model.weight_bytes * read + BYTES * head_weights + kv_bytes) / self.num_gpus / hardware.bytes_per_s
        products = (model.layer_weights + model.expert_share * model.expert_weights) * num_tokens
        products += model.head_weights * work.num_logits
        attention = 2 * model.layers * model.hidden_size * work.num_attended  # scores, and their weighted values
        seconds = PASS_S + max(reading_s, 2 * (products + attention) / self.num_gpus / hardware.flops)
        if self.num_gpus > 1:
            # An all-reduce moves 2 (n - 1) / n of its tensor per GPU.
            moved = BYTES * num_tokens * model.hidden_size * 2 * (self.num_gpus - 1) / self.num_gpus
            each_s = hardware.all_reduce_s + moved / hardware.link_bytes_per_s
            seconds += ALL_REDUCES_PER_LAYER * model.layers * each_s
        return seconds
