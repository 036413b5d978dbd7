"""end_at_shutdown: ends the streams that Serve would cut by killing a stopped replica."""

import asyncio
from collections.abc import Callable

from deployments.errors import ShutdownError
from deployments.ray_internals import shutdown_timeout_s

CHECK_PERIOD_S = 0.5
LAST_WORDS_S = 3.0  # from the errors to the end of the replica


async def end_at_shutdown(end: Callable[[Exception], None]) -> None:
    """Wait until Serve has stopped this replica and is about to kill it; then `end` all open requests with an error."""
    while (timeout_s := shutdown_timeout_s()) is None:  # noqa: ASYNC110 - Serve sends no event
        await asyncio.sleep(CHECK_PERIOD_S)
    seconds = max(timeout_s - LAST_WORDS_S, 0.0)
    await asyncio.sleep(seconds)
    end(ShutdownError(f"the server is shutting down, and the {seconds:g} s to finish requests are over"))
