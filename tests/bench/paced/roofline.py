"""Named devices: GPUs that hold a named model, and pairs of them, with the roofline of the product."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cluster import speed_up
from engine.errors import ConfigError
from engine.execution.roofline import HARDWARE, Model, Placed, Work, decoding
from engine.protocols import Overlap

__all__ = ["HARDWARE", "MODELS", "PacedDevice", "Pair", "Work", "decoding"]

MODELS: Mapping[str, Model] = {
    # meta-llama/Llama-3.1-70B, Llama-3.1-8B and Llama-3.2-1B, from their config.json.
    "70b": Model(68.45e9, 1.05e9, 80, 8192, 1024),
    "8b": Model(6.98e9, 0.525e9, 32, 4096, 1024),
    "1b": Model(0.973e9, 0.263e9, 16, 2048, 512),
}

_PART = re.compile(r"(?P<hardware>[a-z0-9]+?)(x(?P<count>[1-9][0-9]?))?-(?P<model>[a-z0-9]+)")


@dataclass(frozen=True, slots=True)
class PacedDevice(Placed):
    """GPUs that hold a model, by a name such as `h100-8b`, or `h100x4-70b` for four tensor-parallel ones."""

    name: str = ""

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
        return cls(MODELS[match["model"]], HARDWARE[match["hardware"]], int(match["count"] or 1), name)


@dataclass(frozen=True, slots=True)
class Pair(speed_up.Pair):
    """The devices of a target and its draft, and the time of their passes, in seconds."""

    target: PacedDevice
    draft: PacedDevice
    name: str = ""

    @classmethod
    def of(cls, name: str) -> "Pair":
        """Return the pair of a name such as `h100x4-70b+h100-1b`; a name of one device is that of both.

        Raises:
            ConfigError: there is no such device.
        """
        target, _, draft = name.partition("+")
        return cls(PacedDevice.of(target), PacedDevice.of(draft or target), name)

    def overlapped_s(self, num_rows: int, k: int, overlap: Overlap, hit_rate: float, together: float = 1.0) -> float:
        """Return the time in which each row advances by one round.

        Two cohorts that alternate both advance within `2 max(t_v, t_d)`, each with half of the rows.
        """
        if overlap == "alternate":
            half = (num_rows + 1) // 2
            return 2 * max(self.target_s(half, k), self.draft_s(half * together, k))
        return self.round_s(num_rows, k, hit_rate=hit_rate * (overlap == "ahead"), together=together)

    def bound(self, num_rows: float, k: int, context: float) -> float:
        """Return how much faster rounds are whose drafts take no time: `1 + k * t_draft / t_verify`."""
        return 1 + self.draft_s(num_rows, k, context) / self.target_s(num_rows, k, context)
