"""What a replica writes to its log: the format, background tasks that fail, and where a start hangs."""

import asyncio
import faulthandler
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from typing import Any

from cluster.config import LogFormat
from cluster.ray_core import stderr_handler

logger = logging.getLogger("ray.serve")  # the only logger that Serve shows

START_GRACE_S = 30.0  # after `start_timeout_s`, so that a start can first time out by itself and say why


def serve_logging(log_format: LogFormat) -> dict[str, Any]:
    """Return Serve's logging settings for a log format."""
    return {"encoding": "JSON"} if log_format == "json" else {}


def set_log_format(log_format: LogFormat) -> None:
    """Set the format of this process's stderr; Serve's own setting is for its log files only."""
    if log_format == "text":
        return
    files = [handler for handler in logger.handlers if isinstance(handler, MemoryHandler)]
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setFormatter(stderr_handler("json").formatter)
            # The filters of Serve's file add request id, deployment and replica to records.
            handler.filters += [entry for file in files for entry in file.filters if entry not in handler.filters]
    root = stderr_handler("json")
    root.setLevel(logging.WARNING)  # Python's default
    logging.basicConfig(handlers=[root], force=True)


def in_background(work: Coroutine[object, object, None], *, name: str) -> asyncio.Task[None]:
    """Start a task for the replica's lifetime and log an error that ends it; the caller keeps the task."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the task '%s' has failed and is not started again", task.get_name(), exc_info=error)


@contextmanager
def limited_start(start_timeout_s: float) -> Iterator[None]:
    """End this process with the stack of each thread if the block hangs; Serve (2.60) sets no limit itself."""
    # Its timer needs no GIL.
    faulthandler.dump_traceback_later(start_timeout_s + START_GRACE_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
