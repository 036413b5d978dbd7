"""A group as bare processes in the time of the wall: Router, draft and target, without Ray and HTTP.

The engine runs in this process; the two workers run in processes of their own, behind the sockets of the product.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from cluster.remote import RemoteDrafter, RemoteVerifier
from cluster.transport import Connector, Server
from engine.config import EngineConfig
from engine.drafting.registry import choose_method
from engine.engine import Engine
from engine.models.registry import open_model
from engine.config import ModelConfig
from tests.bench.paced.group import Arm, Models, responders
from tests.bench.paced.roofline import Pair
from tests.bench.paced_device import PacedBackend

_NODE = "this node"
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1"}
"""As served workers have it: a process that waits for a pass must not take the CPU from the others."""


def _work(pipe: Connection, role: int, paths: tuple[str, str], pair_name: str, config: EngineConfig, identity: str, run_ahead: bool) -> None:
    """Be a worker until the Router's process ends: role 0 is the target, 1 the draft."""
    torch.set_num_threads(1)
    pair, models = Pair.of(pair_name), Models.load(*paths)
    verifier = models.verifier(config, lambda backend: PacedBackend(backend, pair.target))
    drafter = models.drafter(config, lambda backend: PacedBackend(backend, pair.draft), time.perf_counter, run_ahead=run_ahead)
    responder = responders(verifier, drafter, config)[role]
    server = Server("127.0.0.1", _NODE, identity)
    pipe.send((server.endpoint, verifier.num_blocks, models.target.info))
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
        _, num_blocks, info = answers[0]
        links = [connector.connect(endpoint, version=1) for endpoint, _, _ in answers]
        self.remote_drafter = RemoteDrafter(vocab_size=info.vocab_size, timeout_s=1.0, overlaps=arm.overlaps)
        self.remote_verifier = RemoteVerifier(vocab_size=info.vocab_size, timeout_s=60.0)
        self.remote_verifier.connect(links[:1])
        self.remote_drafter.connect(links[1])
        method = choose_method(config, has_draft_model=True)
        drafter = self.remote_drafter if method.runs_in == "draft" else method.make(config, None)
        self.engine = Engine(
            config,
            info,
            drafter=method.drafter_of_engine(config, drafter),
            verifier=self.remote_verifier,
            num_blocks=num_blocks,
            remote=self.remote_drafter,
        )
        arm.force(self.engine, self.remote_drafter)

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
