"""PacedBackend: computes on the CPU, then lets the time pass that a named GPU would take.

As on CUDA, `run` only launches a pass: the device does one after the other, and the host goes on meanwhile, until
`wait`. The real compute takes place inside `run` and must fit into the pass; passes that did not fit are counted and
logged, and then take as long as the CPU took.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from torch import Tensor

from engine.errors import ModelError
from engine.execution.attention import KVTensors
from engine.execution.backend import Backend, PassOutput
from engine.execution.batch import ForwardBatch
from engine.execution.paced.device import PREFIX, PacedDevice
from engine.execution.paced.roofline import Work
from engine.sampling.noise import Draws

logger = logging.getLogger(__name__)

_SPIN_S = 130e-6
"""A sleep ends up to this much late."""
_LOG_S = 10.0


class PacedBackend:
    """A CPU backend whose passes take the time of a paced device.

    Attributes:
        num_passes, num_late: launched passes, and those whose real compute took longer than the device would.
    """

    def __init__(
        self,
        backend: Backend,
        paced: PacedDevice,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._backend = backend
        self._paced = paced
        self._clock = clock
        self._sleep = sleep
        self._idle_from = 0.0
        self._next_log = 0.0
        self.num_passes = self.num_late = 0
        self.info = replace(backend.info, device=PREFIX + paced.name)
        self.device = backend.device
        logger.warning("%s: passes take the time of %s; this is not a GPU", self.info.name, paced.name)

    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Launch a pass; see `Backend.run`."""
        launched = self._clock()
        output = self._backend.run(batch, draws)
        ends = max(launched, self._idle_from) + self._paced.pass_seconds(work_of(batch))
        self._idle_from = ends
        self.num_passes += 1
        if (now := self._clock()) > ends:
            self.num_late += 1
            self._log_late(now, now - ends)
        return output

    def wait(self) -> None:
        """Sleep until all launched passes are over; the last stretch spins, because a sleep ends late."""
        while (remaining := self._idle_from - self._clock()) > 0:
            if remaining > _SPIN_S:
                self._sleep(remaining - _SPIN_S)

    @property
    def is_busy(self) -> bool:
        """Whether a launched pass is not over."""
        return self._clock() < self._idle_from

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVTensors:
        """Allocate a KV cache for the model that computes."""
        return self._backend.allocate_kv(num_blocks, block_size)

    def thin(self, skipped: Collection[str], kv: KVTensors) -> tuple[Backend, KVTensors]:
        """Refuse: how long a thinned model's passes take is not known.

        Raises:
            ModelError: always.
        """
        raise ModelError(f"{self.info.device} cannot imitate a model that drafts for itself with some of its layers")

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum a tensor over the tensor-parallel ranks of the model that computes."""
        return self._backend.all_reduce(partial)

    def warm_up(self, *, compile_missing: bool = True) -> None:
        """Prepare faster passes of the model that computes."""
        self._backend.warm_up(compile_missing=compile_missing)

    def _log_late(self, now: float, late_s: float) -> None:
        if now >= self._next_log:
            self._next_log = now + _LOG_S
            text = "%s: %d of %d passes did not fit into the time of %s, the last one by %.1f ms"
            logger.warning(text, self.info.name, self.num_late, self.num_passes, self._paced.name, late_s * 1e3)


def work_of(batch: ForwardBatch) -> Work:
    """Return what a batch computes; padding counts, since a GPU computes it, too."""
    limits = [group.limits for group in batch.paged.groups]
    return Work(
        num_tokens=batch.num_tokens,
        num_logits=len(batch.logit_indices),
        num_context_tokens=sum(int(limit.amax(-1).sum()) for limit in limits),
        num_attended=sum(int(limit.sum()) for limit in limits),
    )
