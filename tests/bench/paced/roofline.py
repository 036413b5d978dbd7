"""Named devices: GPUs that hold a named model, and pairs of them, whose passes last as long as a roofline says.

A pass reads its weights and its rows' keys and values once, and multiplies; the slower of the two bounds it (Williams,
Waterman and Patterson, "Roofline"). Added to this are two all-reduces per layer where a model is spread over several
GPUs, and a constant. Assumed away: writing keys and values, activations that do not stay in the caches, and that real
kernels rarely reach both bounds at once. The embedding is looked up, not read.

A round commits `1 + a + ... + a^k` tokens of each request, where `a` is the share of draft tokens that the target
accepts. It takes `t_d(k) + t_v(k)` where draft and target wait for each other. A draft that runs ahead guesses the
token after its draft, too, so it needs `max(t_v(k), t_d(k + 1))` if the verdict was among its guesses.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import ConfigError
from engine.protocols import Overlap


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
    """A decoder with 16-bit weights, keys and values.

    Attributes:
        layer_weights, head_weights: weights of all layers, and of the output head.
        layers, hidden_size, kv_size: number of layers, width, and key/value heads times their size.
    """

    layer_weights: float
    head_weights: float
    layers: int
    hidden_size: int
    kv_size: float


BYTES = 2
"""Bytes of a weight, an activation, a key or a value."""
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
MODELS: Mapping[str, Model] = {
    # meta-llama/Llama-3.1-70B, Llama-3.1-8B and Llama-3.2-1B, from their config.json.
    "70b": Model(68.45e9, 1.05e9, 80, 8192, 1024),
    "8b": Model(6.98e9, 0.525e9, 32, 4096, 1024),
    "1b": Model(0.973e9, 0.263e9, 16, 2048, 512),
}

CONTEXT = 1000
"""Tokens of a request."""
HIT_RATE = 0.9
"""Of one request's verdicts, the share that a draft that runs ahead has prepared for; measured: 0.84 to 0.95."""

_NAME = re.compile(r"(?P<hardware>[a-z0-9]+?)(x(?P<count>[1-9][0-9]?))?-(?P<model>[a-z0-9]+)")


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
class PacedDevice:
    """A model over `num_gpus` tensor-parallel GPUs of one kind, named as `h100-8b` or `h100x4-70b`."""

    model: Model
    hardware: Hardware
    num_gpus: int = 1
    name: str = ""

    @classmethod
    def of(cls, name: str) -> "PacedDevice":
        """Return the device of a name.

        Raises ConfigError if there is no such device; the message says which there are.
        """
        match = _NAME.fullmatch(name)
        if match is None or match["hardware"] not in HARDWARE or match["model"] not in MODELS:
            raise ConfigError(
                f"the paced device is {name!r}; it must be GPU-model or GPUxN-model, with a GPU of "
                f"{', '.join(HARDWARE)} and a model of {', '.join(MODELS)}"
            )
        return cls(MODELS[match["model"]], HARDWARE[match["hardware"]], int(match["count"] or 1), name)

    def pass_seconds(self, work: Work) -> float:
        """Return the time of one pass."""
        model, hardware, num_tokens = self.model, self.hardware, work.num_tokens
        head_weights = model.head_weights if work.num_logits else 0.0
        kv_size = 2 * model.layers * model.kv_size * work.num_context_tokens
        read_bytes = BYTES * (model.layer_weights + head_weights + kv_size)
        products = model.layer_weights * num_tokens + model.head_weights * work.num_logits
        attention = 2 * model.layers * model.hidden_size * work.num_attended  # scores, and their weighted values
        reading_s = read_bytes / self.num_gpus / hardware.bytes_per_s
        seconds = PASS_S + max(reading_s, 2 * (products + attention) / self.num_gpus / hardware.flops)
        if self.num_gpus > 1:
            # An all-reduce moves 2 (n - 1) / n of its tensor per GPU.
            moved = BYTES * num_tokens * model.hidden_size * 2 * (self.num_gpus - 1) / self.num_gpus
            each_s = hardware.all_reduce_s + moved / hardware.link_bytes_per_s
            seconds += ALL_REDUCES_PER_LAYER * model.layers * each_s
        return seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """The devices of a target and its draft, and the time of their passes, in seconds."""

    target: PacedDevice
    draft: PacedDevice

    @classmethod
    def of(cls, name: str) -> "Pair":
        """Return the pair of a name such as `h100x4-70b+h100-1b`; a name of one device is that of both.

        Raises ConfigError if there is no such device.
        """
        target, _, draft = name.partition("+")
        return cls(PacedDevice.of(target), PacedDevice.of(draft or target))

    def target_s(self, num_rows: float, k: int, context: float = CONTEXT) -> float:
        """Return the time of a pass over rows with `k` draft tokens each."""
        return self.target.pass_seconds(decoding(round(num_rows), k + 1, round(context)))

    def draft_s(self, num_rows: float, k: int, context: float = CONTEXT) -> float:
        """Return the time of the `k` passes that make a draft for each row."""
        return k * self.draft.pass_seconds(decoding(round(num_rows), 1, round(context)))

    def overlapped_s(
        self, num_rows: int, k: int, overlap: Overlap = "none", hit_rate: float = HIT_RATE, together: float = 1.0
    ) -> float:
        """Return the time in which each row advances by one round.

        Two cohorts that alternate both advance within `2 max(t_v, t_d)`, each with half of the rows.

        Args:
            hit_rate: of one row's verdicts, the share that a draft that runs ahead has prepared for.
            together: groups whose rows are in each pass of the draft.
        """
        if overlap == "alternate":
            half = (num_rows + 1) // 2
            return 2 * max(self.target_s(half, k), self.draft_s(half * together, k))
        target_s, rows = self.target_s(num_rows, k), num_rows * together
        in_turn_s = target_s + self.draft_s(rows, k)
        hits = hit_rate**num_rows if overlap == "ahead" else 0.0  # of all rows
        return hits * max(target_s, self.draft_s(rows, k + 1)) + (1 - hits) * in_turn_s

    def bound(self, num_rows: float, k: int, context: float) -> float:
        """Return how much faster rounds are whose drafts take no time: `1 + k * t_draft / t_verify`."""
        return 1 + self.draft_s(num_rows, k, context) / self.target_s(num_rows, k, context)
