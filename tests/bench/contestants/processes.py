"""Freezing the processes of a served application.

An application without requests still takes a sixth of a core: Ray's and Serve's processes look after each other. Where
several are measured in turn, those whose turn it is not are frozen.
"""

from contextlib import suppress

import psutil


def freeze(root_pid: int) -> None:
    """Stop a process and all its descendants, including those that start meanwhile."""
    stopped: set[psutil.Process] = set()
    while new := set(_tree(root_pid)) - stopped:
        for process in new:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        stopped |= new


def thaw(root_pid: int) -> None:
    """Let a frozen process and its descendants continue."""
    for process in _tree(root_pid):
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _tree(root_pid: int) -> list[psutil.Process]:
    root = psutil.Process(root_pid)
    return [root, *root.children(recursive=True)]
