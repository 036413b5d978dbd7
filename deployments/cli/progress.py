"""start_progress: shows on a terminal what a start is waiting for."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from deployments.cli.terminal import make_console

_POLL_S = 0.5
_ANSWER_S = 5.0


@contextmanager
def start_progress(logger: logging.Logger) -> Iterator[None]:
    """Show the progress of a start in the block, below the lines of a logger and of Ray; only on a terminal."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
        for handler in logger.handlers:
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)  # `Progress` has replaced it, to write lines above the bar
        has_ended = threading.Event()
        thread = threading.Thread(target=_follow, args=(progress, has_ended), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()


def _follow(progress: Progress, has_ended: threading.Event) -> None:
    task = progress.add_task("loading models", total=None)
    with suppress(RayError, RayServeException, TimeoutError):  # the main thread reports that Serve has ended
        while not has_ended.wait(_POLL_S) and not _is_running():
            pass
        if has_ended.is_set():
            return
        router = serve.get_deployment_handle("Router", "default")
        while not has_ended.wait(_POLL_S) and (compiling := router.compiling.remote().result(timeout_s=_ANSWER_S)):
            done, of, left_s = compiling
            words = f"serving; compiling passes: {done} of {of}, about {left_s:.0f} s left"
            progress.update(task, description=words, completed=done, total=of)
    progress.remove_task(task)


def _is_running() -> bool:
    applications = serve.status().applications.values()
    return bool(applications) and all(application.status == "RUNNING" for application in applications)
