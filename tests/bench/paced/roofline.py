"""Named devices: GPUs that hold a named model, and pairs of them, whose passes last as long as a roofline says.

A round commits `1 + a + ... + a^k` tokens of each request, where `a` is the share of draft tokens that the target
accepts. It takes `t_d(k) + t_v(k)` where draft and target wait for each other. A draft that runs ahead guesses the
token after its draft, too, so it needs `max(t_v(k), t_d(k + 1))` if the verdict was among its guesses.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.protocols import Overlap
from tests.bench.paced.datasheet import HARDWARE, Model, Placed, Work, decoding

__all__ = ["HARDWARE", "MODELS", "PacedDevice", "Pair", "Work", "decoding"]

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
class Pair:
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

    def target_s(self, num_rows: float, k: int, context: float = CONTEXT) -> float:
        """Return the time of a pass over rows with `k` draft tokens each."""
        return self.target.pass_seconds(decoding(round(num_rows), k + 1, round(context)))

    def draft_s(self, num_rows: float, k: int, context: float = CONTEXT) -> float:
        """Return the time of the `k` passes that make a draft for each row."""
        return k * self.draft.pass_seconds(decoding(round(num_rows), 1, round(context)))

    def round_s(self, num_rows: int, k: int, *, hit_rate: float = 0.0, together: float = 1.0) -> float:
        """Return the time of a round.

        Args:
            hit_rate: of one row's verdicts, the share that a draft that runs ahead has prepared for; 0 if it does not.
            together: groups whose rows are in each pass of the draft.
        """
        target_s, rows = self.target_s(num_rows, k), num_rows * together
        in_turn_s, hits = target_s + self.draft_s(rows, k), hit_rate**num_rows  # of all rows
        return hits * max(target_s, self.draft_s(rows, k + 1)) + (1 - hits) * in_turn_s

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
