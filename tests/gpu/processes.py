"""Processes of a stage: each has a connection to the stage, and is killed with it."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch


def start(device: str, work: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """Run `work(connection, *arguments)` in another process; a dry run forks, which needs no imports."""
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(work, theirs, *arguments), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    return process, ours


def _run(work: Callable[..., None], connection: Connection, *arguments: object) -> None:
    torch.set_num_threads(1)
    work(connection, *arguments)
