"""start_progress: shows on a terminal what a start is waiting for; elsewhere the processes' log lines tell it."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from deployments.cli.terminal import make_console
from engine.config import CompileProgress

_POLL_S = 0.5
_ANSWER_S = 5.0


@contextmanager
def start_progress(logger: logging.Logger) -> Iterator[None]:
    """Show the progress of the block's start below the log lines.

    Args:
        logger: whose lines go above it.
    """
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield
        return
    is_stopped = threading.Event()
    thread = threading.Thread(target=_show, args=(console, logger, is_stopped), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_stopped.set()
        thread.join()


def _show(console: Console, logger: logging.Logger, is_stopped: threading.Event) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    streams = [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
        before = [handler.setStream(sys.stderr) for handler in streams]  # Progress has replaced it
        try:
            task = progress.add_task("loading models", total=None)
            while not is_stopped.wait(_POLL_S) and not _is_running():
                pass
            while not is_stopped.wait(_POLL_S) and (compiling := _compiling()) is not None:
                done, of, left_s = compiling
                words = f"serving; compiling passes: {done} of {of}, about {left_s:.0f} s left"
                progress.update(task, description=words, completed=done, total=of)
        except (RayError, RayServeException, TimeoutError):
            logger.debug("no more progress is shown", exc_info=True)  # the main thread says what has ended
        finally:
            for handler, stream in zip(streams, before, strict=True):
                if stream is not None:
                    handler.setStream(stream)


def _is_running() -> bool:
    applications = serve.status().applications.values()
    return bool(applications) and all(application.status == "RUNNING" for application in applications)


def _compiling() -> CompileProgress | None:
    """Return how far a Router's models are compiled; None if they are, or run eagerly."""
    router = serve.get_deployment_handle("Router", "default")
    compiling: CompileProgress | None = router.compiling.remote().result(timeout_s=_ANSWER_S)
    return compiling
