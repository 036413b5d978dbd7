"""Figures of GPUs and models, from which the roofline computes the time of a pass.

Bandwidth and arithmetic are datasheet figures (dense, 16-bit) times the share that good kernels reach. Tied or not, the
embedding that is only looked up is not read in a pass, so it is not among a model's weights here.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU of a node.

    Attributes:
        bytes_per_s: bandwidth of its memory.
        flops: 16-bit floating-point operations per second, without sparsity.
        link_bytes_per_s: what an all-reduce moves between GPUs per second (bus bandwidth).
        all_reduce_s: an all-reduce of few bytes, captured in a graph.
    """

    bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    all_reduce_s: float


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with 16-bit weights, keys and values.

    Attributes:
        layer_weights: weights of all layers.
        head_weights: weights of the output head.
        layers, hidden_size, kv_size: number of layers, width, and key/value heads times their size.
    """

    layer_weights: float
    head_weights: float
    layers: int
    hidden_size: int
    kv_size: int


BYTES = 2
"""Bytes of a weight, an activation, a key or a value."""

BANDWIDTH_SHARE = 0.9
"""Of the datasheet: 3.0 of 3.35 TB/s are usual for decoding on an H100."""
FLOPS_SHARE = 0.65
"""Of the datasheet: large 16-bit products reach 600 to 700 of 989 TFLOPS on an H100."""
PASS_S = 20e-6
"""What a pass takes besides: launching its graph and copying its tokens to the host."""
ALL_REDUCES_PER_LAYER = 2
"""After attention and after the MLP (Shoeybi et al., 1909.08053)."""

_NVLINK_4 = 366e9
"""Measured with nccl-tests on four H100 (bus bandwidth); older links in proportion to their datasheets."""
_NCCL_S = 18e-6
"""NCCL in a captured graph: about 3 ms for the 160 all-reduces of a 70B pass. One-shot kernels take about 8 us."""

HARDWARE: Mapping[str, Hardware] = {
    # NVIDIA H200 and H100 SXM datasheets.
    "h200": Hardware(4.8e12 * BANDWIDTH_SHARE, 989e12 * FLOPS_SHARE, _NVLINK_4, _NCCL_S),
    "h100": Hardware(3.35e12 * BANDWIDTH_SHARE, 989e12 * FLOPS_SHARE, _NVLINK_4, _NCCL_S),
    # NVIDIA A100 80 GB SXM datasheet.
    "a100": Hardware(2.039e12 * BANDWIDTH_SHARE, 312e12 * FLOPS_SHARE, _NVLINK_4 * 600 / 900, _NCCL_S),
    # NVIDIA L4 datasheet; between several of them PCIe 4.0, 32 GB/s each way, with assumed 30 us per all-reduce.
    "l4": Hardware(0.3e12 * BANDWIDTH_SHARE, 121e12 * FLOPS_SHARE, 32e9 * 0.8, 30e-6),
}

MODELS: Mapping[str, Model] = {
    # meta-llama/Llama-3.1-70B, Llama-3.1-8B and Llama-3.2-1B, from their config.json.
    "70b": Model(68.45e9, 1.05e9, 80, 8192, 1024),
    "8b": Model(6.98e9, 0.525e9, 32, 4096, 1024),
    "1b": Model(0.973e9, 0.263e9, 16, 2048, 512),
}
