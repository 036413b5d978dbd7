"""Takes the time of a named GPU for passes that the CPU computes.

Texts, acceptance and messages are those of the loaded model; a pass takes as long as `paced/roofline` says that a named
model would take on named hardware. While a GPU works, its host's cores are free, and so are they here: the process
sleeps.

    PACELINE_BACKEND=tests.bench.paced_device:pace PACELINE_PACED=h100x4-70b+h100-1b \
        python -m deployments device=cpu run_ahead=on
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.execution.backend import Backend, Part, PassOutput
from engine.execution.batch import ForwardBatch
from engine.execution.kv_tensors import KVTensors
from engine.execution.registry import WRAPPER
from engine.sampling.noise import Draws
from tests.bench.paced.roofline import PacedDevice, Pair, Work

logger = logging.getLogger(__name__)

VARIABLE = "PACELINE_PACED"
"""The environment variable that names the devices of target and draft."""
_SPIN_S = 130e-6
"""A sleep ends up to this much late, on Linux with its usual timer slack."""


def environment(pair: str) -> dict[str, str]:
    """Return the variables that pace a target and the draft in the folder `draft`, in all processes that load one."""
    return {WRAPPER: f"{__name__}:{pace.__name__}", VARIABLE: pair}


def pace(backend: Backend) -> Backend:
    """Pace a loaded model: one in a folder named `draft` as the draft of the named pair, any other as its target.

    Raises ConfigError if the name is not one of a pair.
    """
    pair = Pair.of(os.environ[VARIABLE])
    return PacedBackend(backend, pair.draft if Path(backend.info.name).name == "draft" else pair.target)


class Accelerator:
    """Computes one pass after another: a GPU, or several that share a model.

    Attributes:
        idle_from: when all launched passes are over.
        busy_s: seconds of passes so far.
    """

    def __init__(self) -> None:
        self.idle_from = self.busy_s = 0.0

    def launch(self, now: float, seconds: float) -> float:
        """Queue a pass; return when it ends."""
        self.idle_from = max(now, self.idle_from) + seconds
        self.busy_s += seconds
        return self.idle_from


class PacedBackend:
    """A backend whose passes take the time of a paced device; all else is done by the backend that it wraps.

    As on CUDA, `run` only launches a pass: the device computes one pass after another, and the host continues until
    `wait`. The real compute takes place inside `run` and must fit into the pass; a pass that did not fit takes as long
    as the CPU took.

    Args:
        accelerator: what computes the passes, where other backends use it, too.
        spin_s: a sleep ends up to this much late.
    """

    def __init__(
        self,
        backend: Backend,
        paced: PacedDevice,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        accelerator: Accelerator | None = None,
        spin_s: float = _SPIN_S,
    ) -> None:
        self._backend = backend
        self._paced = paced
        self._clock = clock
        self._sleep = sleep
        self._accelerator = accelerator or Accelerator()
        self._spin_s = spin_s
        self._ends = 0.0
        self.info = replace(backend.info, device=f"paced:{paced.name}")
        logger.warning("%s: passes take the time of %s; this is not a GPU", self.info.name, paced.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Launch a pass; see `Backend.run`."""
        launched = self._clock()
        output = self._backend.run(batch, draws)
        self._ends = self._accelerator.launch(launched, self._paced.pass_seconds(work_of(batch)))
        return output

    def wait(self) -> None:
        """Sleep until all launched passes are over; the last stretch spins, because a sleep ends late."""
        while (remaining := self._ends - self._clock()) > 0:
            if remaining > self._spin_s:
                self._sleep(remaining - self._spin_s)

    @property
    def is_busy(self) -> bool:
        return self._clock() < self._ends

    def beside(self, part: Part, kv: KVTensors) -> tuple[Backend, KVTensors]:
        """Refuse, because it is not known how long a thinned model's passes take; always raises ModelError."""
        raise ModelError(f"{self.info.device} cannot imitate a model that drafts for itself with some of its layers")


def work_of(batch: ForwardBatch) -> Work:
    """Return what a batch computes; padding counts, since a GPU computes it, too."""
    limits = [group.limits for group in batch.paged.groups]
    return Work(
        num_tokens=batch.num_tokens,
        num_logits=len(batch.logit_indices),
        num_context_tokens=sum(int(limit.amax(-1).sum()) for limit in limits),
        num_attended=sum(int(limit.sum()) for limit in limits),
    )
