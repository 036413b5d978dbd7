"""The twin of a speculation group: engine, roles, responders, drafters and verifier are the product's own.

Models compute, as light ones of `light_pair`, so texts, acceptance and messages are real; passes take the time of the
named devices on the clock of the process that they run in.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

import cluster.remote
import cluster.workers.responder
from cluster.remote import RemoteDrafter, RemoteVerifier
from engine.config import EngineConfig
from engine.drafting.registry import choose_method
from engine.engine import Engine
from engine.execution.backend import Backend
from tests.bench.paced.group import Arm, Models, responders
from tests.bench.paced.roofline import PacedDevice, Pair
from tests.bench.paced.virtual.clock import Process, VirtualLoop, virtual_time
from tests.bench.paced.virtual.wire import Costs, VirtualLink, VirtualWorker
from tests.bench.paced_device import Accelerator, PacedBackend

T = TypeVar("T")

TIMED = cluster.remote, cluster.workers.responder
"""The modules that read the time themselves."""


class Twin:
    """A Router, a target and a draft worker. Within this context, the time of product modules is its event loop's.

    Args:
        is_beside: the draft is on the target's GPUs, so that their passes take turns.
    """

    def __init__(
        self, models: Models, pair: Pair, arm: Arm, config: EngineConfig, costs: Costs, *, is_beside: bool = False
    ) -> None:
        self.loop = VirtualLoop()
        self.router, self.target, self.draft = Process(), Process(), Process()
        self.target_gpus = Accelerator()
        self.draft_gpu = self.target_gpus if is_beside else Accelerator()
        self._arm, self._costs = arm, costs
        self._tasks: list[asyncio.Task[None]] = []
        info = models.target.info
        verifier = models.verifier(config, lambda backend: _paced(backend, pair.target, self.target, self.target_gpus))
        self.drafter = models.drafter(
            config,
            lambda backend: _paced(backend, pair.draft, self.draft, self.draft_gpu),
            self.draft.clock,
            run_ahead="ahead" in arm.overlaps,
        )
        self._responders = responders(verifier, self.drafter, config)
        self.remote_drafter = RemoteDrafter(vocab_size=info.vocab_size, timeout_s=1.0, overlaps=arm.overlaps)
        self.remote_verifier = RemoteVerifier(vocab_size=info.vocab_size, timeout_s=60.0)
        method = choose_method(config, has_draft_model=True)
        drafter = self.remote_drafter if method.runs_in == "draft" else method.make(config, None)
        self.engine = Engine(
            config,
            info,
            drafter=method.drafter_of_engine(config, drafter),
            verifier=self.remote_verifier,
            num_blocks=verifier.num_blocks,
            clock=self.loop.time,
            remote=self.remote_drafter,
        )
        arm.force(self.engine, self.remote_drafter)

    def __enter__(self) -> Self:
        self._time = virtual_time(*TIMED)
        self._time.__enter__()
        self.loop.run_until_complete(self._connect())
        return self

    def __exit__(self, *error: Any) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
        self._time.__exit__(*error)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def _connect(self) -> None:
        links = []
        for responder, process in zip(self._responders, (self.target, self.draft), strict=True):
            worker = VirtualWorker(responder.answer, responder.work, process, self._costs)
            self._tasks.append(asyncio.create_task(worker.serve()))
            links.append(VirtualLink(self.router, worker, self._costs))
        self.remote_verifier.connect(links[:1])  # type: ignore[arg-type]
        self.remote_drafter.connect(links[1])  # type: ignore[arg-type]


def _paced(backend: Backend, device: PacedDevice, process: Process, accelerator: Accelerator) -> Backend:
    paced: Any = PacedBackend(
        backend, device, clock=process.clock, sleep=process.sleep, accelerator=accelerator, spin_s=0.0
    )
    return paced
