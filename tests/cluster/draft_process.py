"""Draft workers that groups share, each in a process of its own, that die, hang or become slow on demand."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from cluster.config import GroupConfig
from cluster.leases import Lease
from cluster.workers.draft_worker import DraftWorker
from engine.errors import TargetError
from tests.cluster.wire import NODE_ID

_ANSWER_S = 120.0
_context = multiprocessing.get_context("spawn")


def _serve(config: GroupConfig, name: str, connection: Connection, delay_s: Any) -> None:
    torch.set_num_threads(1)
    worker = DraftWorker(config, name, max_groups=4, node=("127.0.0.1", NODE_ID))
    connection.send(worker.load())
    run = worker._backend.run

    def late(*arguments: Any) -> Any:
        time.sleep(delay_s.value)
        return run(*arguments)

    worker._backend.run = late  # type: ignore[method-assign]
    threading.Thread(target=worker.serve, daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            try:
                connection.send(worker.lease(*connection.recv()))
            except TargetError as error:
                connection.send(error)


class DraftProcess:
    """One worker; `delay_s` is added to each pass of its model."""

    def __init__(self, config: GroupConfig, name: str) -> None:
        self.name, self.delay_s = name, _context.Value("d", 0.0)
        self._connection, other = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(config, name, other, self.delay_s), daemon=True)
        self._process.start()
        assert self._connection.poll(_ANSWER_S)
        self.info = self._connection.recv()

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def lease(self, identity: str, num_rows: int) -> Lease:
        self._connection.send((identity, num_rows))
        assert self._connection.poll(_ANSWER_S)
        answer = self._connection.recv()
        if isinstance(answer, TargetError):
            raise answer
        assert isinstance(answer, Lease)
        return answer

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join()


class Workers:
    """The Leases of some workers, in their order; it remembers who took what."""

    def __init__(self, config: GroupConfig, processes: list[DraftProcess]) -> None:
        self.config, self.processes, self.taken = config, processes, list[tuple[str, str]]()

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        await asyncio.sleep(0)
        worker = next((one for one in self.processes if one.name not in avoid), None)
        if worker is None:
            raise TargetError("no worker is left")
        self.taken.append((identity, worker.name))
        return worker.lease(identity, num_rows)


@contextlib.contextmanager
def workers_of(config: GroupConfig, *names: str) -> Iterator[Workers]:
    workers: list[DraftProcess] = []
    try:
        workers += [DraftProcess(config, name) for name in names]
        yield Workers(config, workers)
    finally:
        for worker in workers:
            worker.end()
