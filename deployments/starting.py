"""watched_start: ends this process if its start hangs, so that Serve starts another one.

Serve (2.60) waits for a replica's constructor for ever. What is imported before the constructor runs is not watched.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from deployments.start_watcher import NUM_STEPS

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

GRACE_S = 30.0
"""How much longer than its setting a start may take: one that fails by itself says more about the reason."""
_PROGRAM = Path(__file__).with_name("start_watcher.py")


@contextmanager
def watched_start(hang_timeout_s: float, start_timeout_s: float) -> Iterator[None]:
    """Kill this process if it does not answer for `hang_timeout_s`, or if the block takes too long.

    Another process does so, which ends with the block. A thread answers it, also while the block waits for something.
    """
    # -I, -S: it needs no packages, and starts in a third of the time without them.
    numbers = (os.getpid(), hang_timeout_s, start_timeout_s + GRACE_S)
    command = [sys.executable, "-I", "-S", str(_PROGRAM), *map(str, numbers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0) as watcher:
        has_started = threading.Event()
        arguments = (watcher.stdin, has_started, hang_timeout_s / NUM_STEPS)
        answering = threading.Thread(target=_answer, args=arguments, name="answering the start's watcher", daemon=True)
        answering.start()
        try:
            yield
        finally:
            has_started.set()
            answering.join()
            watcher.kill()


def _answer(pipe: IO[bytes], has_started: threading.Event, period_s: float) -> None:
    while not has_started.wait(period_s):
        try:
            pipe.write(b".")
        except BrokenPipeError:
            logger.warning("the process that watches this start has ended")
            return
