"""in_background: a task that runs for as long as its replica; an error that ends it sooner is logged."""

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows


def in_background(work: Coroutine[object, object, None], *, name: str, loss: str) -> asyncio.Task[None]:
    """Start a task, which the caller must keep.

    Args:
        loss: what is not done any more if an error ends the task.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(partial(_report, loss))
    return task


def _report(loss: str, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s any more", loss, exc_info=error)
