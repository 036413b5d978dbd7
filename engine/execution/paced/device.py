"""The names of paced devices: `paced:h100x4-70b+h100-1b` is a 70B target on four H100 and a 1B draft on a fifth.

A part is `GPU-model` or `GPUxN-model`, for one GPU or N tensor-parallel ones. `/shared` behind the draft's part puts
the draft on the target's device, where the two take turns.
"""

import os
import re
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.execution.paced.parameters import HARDWARE, MODELS
from engine.execution.paced.roofline import Work, pass_seconds

PREFIX = "paced:"
VARIABLE = "PACELINE_PACED"
_SHARED = "/shared"
_PART = re.compile(r"(?P<hardware>[a-z0-9]+?)(x(?P<count>[1-9][0-9]?))?-(?P<model>[a-z0-9]+)")


@dataclass(frozen=True, slots=True)
class PacedDevice:
    """A number of GPUs that hold a model.

    Attributes:
        name: without the prefix.
        is_shared: a draft's device that is the target's.
    """

    name: str
    hardware: str
    num_gpus: int
    model: str
    is_shared: bool = False

    def pass_seconds(self, work: Work) -> float:
        """Return the time of a pass."""
        return pass_seconds(work, MODELS[self.model], HARDWARE[self.hardware], self.num_gpus)


def is_paced(device: str) -> bool:
    """Return whether a `device` setting names a paced device."""
    return device.startswith(PREFIX)


def parse_device(device: str) -> PacedDevice:
    """Return the paced device of one model.

    Raises:
        ConfigError: the name is not one of a paced device; the message says which names are.
    """
    name = device.removeprefix(PREFIX)
    match = _PART.fullmatch(name.removesuffix(_SHARED))
    if match is None or match["hardware"] not in HARDWARE or match["model"] not in MODELS:
        raise ConfigError(
            f"device has the part {name!r}; it must be GPU-model or GPUxN-model, with a GPU of {', '.join(HARDWARE)} "
            f"and a model of {', '.join(MODELS)}"
        )
    is_shared = name.endswith(_SHARED)
    return PacedDevice(name, match["hardware"], int(match["count"] or 1), match["model"], is_shared)


def split_pair(device: str) -> tuple[str, str]:
    """Return the devices of target and draft; a name of one part is that of both.

    Raises:
        ConfigError: a part is not the name of a paced device.
    """
    target, _, draft = device.removeprefix(PREFIX).partition("+")
    for part in filter(None, (target, draft)):
        parse_device(part)
    return PREFIX + target, PREFIX + (draft or target)


def check_allowed(device: str) -> None:
    """Refuse a paced device where nobody has said that this is a bench or a test.

    Raises:
        ConfigError: the environment does not allow paced devices, or the name is wrong.
    """
    split_pair(device)
    if os.environ.get(VARIABLE) != "1":
        raise ConfigError(
            f"device is {device!r}, which only imitates a GPU's speed; {VARIABLE}=1 allows it, for benches and tests"
        )
