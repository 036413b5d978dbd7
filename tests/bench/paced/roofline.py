"""Roofline: how long a forward pass of a named model takes on named GPUs.

A pass reads its weights and its rows' keys and values once, and multiplies; the slower of the two bounds it (Williams,
Waterman and Patterson, "Roofline"). Added to this are two all-reduces per layer where a model is spread over several
GPUs, and a constant. Assumed away: the time to write keys and values, activations that do not stay in the caches, and
that real kernels rarely reach both bounds at once.

Bandwidth and arithmetic are datasheet figures (dense, 16-bit) times the share that good kernels reach. Tied or not, the
embedding that is only looked up is not read in a pass, so it is not among a model's weights here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import ConfigError


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

_PART = re.compile(r"(?P<hardware>[a-z0-9]+?)(x(?P<count>[1-9][0-9]?))?-(?P<model>[a-z0-9]+)")


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
    seconds = PASS_S + max(reading_s, arithmetic_s)
    if num_gpus > 1:
        # An all-reduce moves 2 (n - 1) / n of its tensor per GPU.
        moved = BYTES * work.num_tokens * model.hidden_size * 2 * (num_gpus - 1) / num_gpus
        each_s = hardware.all_reduce_s + moved / hardware.link_bytes_per_s
        seconds += ALL_REDUCES_PER_LAYER * model.layers * each_s
    return seconds


@dataclass(frozen=True, slots=True)
class PacedDevice:
    """GPUs that hold a model, by a name such as `h100-8b`, or `h100x4-70b` for four tensor-parallel ones."""

    name: str
    hardware: str
    num_gpus: int
    model: str

    @classmethod
    def of(cls, name: str) -> "PacedDevice":
        """Return the device of a name.

        Raises:
            ConfigError: there is no such device; the message says which there are.
        """
        match = _PART.fullmatch(name)
        if match is None or match["hardware"] not in HARDWARE or match["model"] not in MODELS:
            raise ConfigError(
                f"the paced device is {name!r}; it must be GPU-model or GPUxN-model, with a GPU of "
                f"{', '.join(HARDWARE)} and a model of {', '.join(MODELS)}"
            )
        return cls(name, match["hardware"], int(match["count"] or 1), match["model"])

    def pass_seconds(self, work: Work) -> float:
        return pass_seconds(work, MODELS[self.model], HARDWARE[self.hardware], self.num_gpus)


@dataclass(frozen=True, slots=True)
class Pair:
    """The devices of a target and its draft, and the time of their passes, in seconds."""

    name: str
    target: PacedDevice
    draft: PacedDevice

    @classmethod
    def of(cls, name: str) -> "Pair":
        """Return the pair of a name such as `h100x4-70b+h100-1b`; a name of one device is that of both.

        Raises:
            ConfigError: there is no such device.
        """
        target, _, draft = name.partition("+")
        return cls(name, PacedDevice.of(target), PacedDevice.of(draft or target))

    def target_s(self, num_rows: float, k: int, context: float) -> float:
        """Return the time of a pass over rows with `k` draft tokens each."""
        return self.target.pass_seconds(decoding(round(num_rows), k + 1, round(context)))

    def draft_s(self, num_rows: float, k: int, context: float) -> float:
        """Return the time of the `k` passes that make a draft for each row."""
        return k * self.draft.pass_seconds(decoding(round(num_rows), 1, round(context)))

    def bound(self, num_rows: float, k: int, context: float) -> float:
        """Return how much faster rounds are whose drafts take no time: `1 + k * t_draft / t_verify`."""
        return 1 + self.draft_s(num_rows, k, context) / self.target_s(num_rows, k, context)
