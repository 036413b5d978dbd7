"""The cache folder, and temporary folders; after a kill, the next process removes the killed process's folder."""

import os
import shutil
import tempfile
from pathlib import Path

import psutil  # type: ignore[import-untyped]

CACHE_VARIABLE = "PACELINE_CACHE_DIR"


def cache_folder() -> Path:
    """Return the folder that keeps compiled code and measurements on this machine."""
    root = os.environ.get(CACHE_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "paceline"
    return Path(root).expanduser()


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new temporary folder for this user only; first remove the folders of processes that were killed."""
    prefix = f"paceline-{_process_namespace()}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        process_id = folder.name.removeprefix(prefix).partition("-")[0]
        if process_id.isdigit() and not psutil.pid_exists(int(process_id)):
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", ignore_cleanup_errors=True)


def _process_namespace() -> int:
    """Return the PID namespace: containers can share the temporary folder, but not process ids."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        return 0
