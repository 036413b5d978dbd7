"""A group as bare processes in the time of the wall: Router, draft and target, without Ray and HTTP.

The engine runs in this process; the two workers run in processes of their own, behind the sockets of the product.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from cluster.transport import Connector, Server
from engine.config import EngineConfig
from engine.execution.backend import Backend
from tests.bench.paced.group import Arm, Models, answer_drafts, answer_verifications, make_engine
from tests.bench.paced.roofline import PacedDevice, Pair
from tests.bench.paced_device import PacedBackend

if TYPE_CHECKING:
    from cluster.workers.responder import DraftResponder, TargetResponder

_NODE = "this node"
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1"}
"""As served workers have it: a process that waits for a pass must not take the CPU from the others."""


def _work(
    pipe: Connection,
    role: int,
    paths: tuple[str, str],
    pair_name: str,
    config: EngineConfig,
    identity: str,
    run_ahead: bool,
) -> None:
    """Be a worker until the Router's process ends: role 0 is the target, 1 the draft."""
    torch.set_num_threads(1)
    pair, models = Pair.of(pair_name), Models.load(*paths)
    responder: TargetResponder | DraftResponder
    if role == 0:
        verifier = models.verifier(config, partial(_paced, pair.target))
        responder = answer_verifications(verifier, config)
    else:
        pace = partial(_paced, pair.draft)
        responder = answer_drafts(models.drafter(config, pace, time.perf_counter, run_ahead=run_ahead), config)
    server = Server("127.0.0.1", _NODE, identity)
    pipe.send((server.endpoint, models.target.info))
    server.serve(responder.answer, responder.work)


class BareGroup:
    """An engine over two worker processes; made and used within one event loop."""

    def __init__(self, paths: tuple[str, str], pair: str, arm: Arm, config: EngineConfig) -> None:
        connector, context = Connector(_NODE), multiprocessing.get_context("spawn")
        self._processes, ends = [], []
        for role in range(2):
            here, there = context.Pipe()
            arguments = there, role, paths, pair, config, connector.identity, "ahead" in arm.overlaps
            with _environment(PASSIVE):
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
            self._processes.append(process)
            ends.append(here)
        answers = [end.recv() for end in ends]
        links = [connector.connect(endpoint, version=1) for endpoint, _ in answers]
        self.engine, drafter, verifier = make_engine(arm, config, answers[0][1], time.perf_counter)
        verifier.connect(links[:1])
        drafter.connect(links[1])

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _paced(device: PacedDevice, backend: Backend) -> Backend:
    paced: Any = PacedBackend(backend, device)
    return paced
