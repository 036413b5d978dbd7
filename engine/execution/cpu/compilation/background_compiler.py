"""BackgroundCompiler: compiles a model's passes in another process while the model is served eagerly.

The process has idle priority, so that decoding comes first. Later starts find the result in the cache.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from engine.config import CompileProgress
from engine.execution.scratch import cache_folder, scratch_folder
from engine.models.source import ModelSource

logger = logging.getLogger(__name__)

_START_S = 23.0
_LAYER_S = 1.7
"""Estimated CPU seconds of a compilation, and of each of its layers; measured for 2 to 24 layers."""


class BackgroundCompiler:
    """A compiling process, which also ends if this process is killed, and the thread that waits for it."""

    def __init__(
        self,
        source: ModelSource,
        dtype: str,
        parts: Sequence[Path],
        ready: Callable[[], None],
        *,
        num_layers: int,
        is_self_draft: bool = False,
    ) -> None:
        """Start the thread, which calls `ready` once all files in `parts` exist, or else logs a failure."""
        # Absolute, because the process runs in another folder.
        directory = str(source.directory.resolve())
        options = ["--dtype", dtype, "--quantization", source.config.quantization, "--until-input-ends"]
        options += ["--self-draft-layers", str(num_layers)] if is_self_draft else []
        if (head := source.config.head) is not None:
            if head == source.config.path:
                head = directory
            options += ["--head", str(Path(head).resolve()) if Path(head).is_dir() else head]
        self._command = ["-m", "engine.execution.cpu", directory, *options]
        self._name = source.path
        # One process per model and machine at a time, and one for all models on a single core.
        model = hashlib.sha256(directory.encode()).hexdigest()[:16] if (os.cpu_count() or 1) > 1 else "all"
        self._lock = f"compiling-{model}.lock"
        self._ready = ready
        self._expected_s = _START_S + _LAYER_S * num_layers
        self._process: psutil.Popen | None = None
        self._parts = parts
        self._has_ended = False
        threading.Thread(target=self._run, daemon=True, name="compiling").start()

    @property
    def progress(self) -> CompileProgress | None:
        """Compiled files and estimated seconds left; None once compiling has ended."""
        if self._has_ended:
            return None
        left_s = self._expected_s
        if self._process is not None:  # no other model compiles
            elapsed_s = time.monotonic() - self._started
            with contextlib.suppress(psutil.NoSuchProcess):
                computed_s = sum(self._process.cpu_times()[:4]) or elapsed_s  # the compilers' time, too
                left_s = max(1.0, left_s - computed_s) * elapsed_s / computed_s
        return CompileProgress(sum(path.exists() for path in self._parts), len(self._parts), left_s)

    def _run(self) -> None:
        try:
            reason = self._compile()
        except OSError as error:
            reason = str(error)
        if reason is None:
            self._ready()
        else:
            logger.warning("%s: serving eagerly, compiling failed: %s", self._name, reason)
        self._has_ended = True

    def _compile(self) -> str | None:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with (
            (cache_folder() / self._lock).open("w") as lock,
            scratch_folder() as folder,  # a C++ compiler that is killed leaves its files behind
            tempfile.TemporaryFile("w+", dir=folder) as errors,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._parts and all(path.exists() for path in self._parts):  # a head is compiled with its target
                return None
            self._started = time.monotonic()
            self._process = process = self._start(folder, errors.fileno())
            logger.info("%s runs eagerly until it is compiled", self._name)
            if (status := process.wait()) == 0:
                logger.info("%s: compiled in %.0f s", self._name, time.monotonic() - self._started)
                return None
            errors.seek(0)
            return (errors.read().strip().splitlines() or [f"exit status {status}"])[-1]

    def _start(self, folder: str, errors: int) -> psutil.Popen:
        few_threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        process = psutil.Popen(
            [sys.executable, *self._command],
            cwd=Path(__file__).parents[4],
            env=os.environ | few_threads | {"TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            # Not a session, because Linux shares cores between sessions whatever their priorities.
            process_group=0,
        )
        process.nice(19)
        if hasattr(os, "sched_setscheduler"):  # Linux
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        return process
