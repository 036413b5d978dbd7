"""Draining: ends the streams that are still open when the time to finish them is over, with an error that says so.

When Serve stops a replica it sends no new requests to it and waits until those that it has are finished. At
`graceful_shutdown_timeout_s` it kills the replica, which would cut connections without a word.
"""

import asyncio
from collections.abc import Callable

from deployments.background import in_background
from deployments.router.stopping import stopped_replica
from engine.errors import CapacityError

CHECK_PERIOD_S = 0.5
LAST_WORDS_S = 3.0
"""Part of Serve's timeout: the errors are sent so long before the replica is killed."""


class ShutdownError(CapacityError):
    """The server is shutting down, and the time to finish requests is over."""


def drain_s() -> float | None:
    """Return how many seconds this replica has to finish its requests since Serve stopped it; None while it serves."""
    replica = stopped_replica()
    if replica is None:
        return None
    return max(float(replica._deployment_config.graceful_shutdown_timeout_s) - LAST_WORDS_S, 0.0)


class Draining:
    """Waits until this replica is stopped, and then until its time is over."""

    def __init__(self, end: Callable[[Exception], None], drain_s: Callable[[], float | None] = drain_s) -> None:
        """Start to wait.

        Args:
            end: ends all open requests with an error.
            drain_s: as the function of this name.
        """
        self._end = end
        self._drain_s = drain_s
        loss = "streams that outlast a shutdown are not ended"
        self._task = in_background(self._run(), name="draining", loss=loss)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            if (seconds := self._drain_s()) is not None:
                break
        await asyncio.sleep(seconds)
        self._end(ShutdownError(f"the server is shutting down, and the {seconds:g} s to finish requests are over"))
