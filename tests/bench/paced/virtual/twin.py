"""The twin of one or several speculation groups: what is between engine and models is the product's own.

Models compute, so texts, acceptance and messages are real; passes take the time of the named devices on the clock of
the process that they run in.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import cluster.remote_drafter
import cluster.remote_verifier
import cluster.workers.draft_queue
import cluster.workers.responder
from cluster.protocol.messages import AnyReply, AnyRequest
from cluster.remote_drafter import RemoteDrafter
from cluster.workers.responder import TargetResponder
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.backend import Backend
from tests.bench.paced.group import Models, answer_verifications, make_engine, use
from tests.bench.paced.roofline import PacedDevice, Pair
from tests.bench.paced.virtual.clock import Process, VirtualLoop, virtual_time
from tests.bench.paced.virtual.wire import Answer, Costs, VirtualLink, VirtualWorker
from tests.bench.paced_device import Accelerator, PacedBackend
from tests.bench.workload import Arm

T = TypeVar("T")

Place = Literal["own", "beside", "pool"]
"""Where drafts are made: on a GPU of each group's own, on one of the target's GPUs, or on a GPU of all groups."""
TIMED = cluster.remote_drafter, cluster.remote_verifier, cluster.workers.responder, cluster.workers.draft_queue
"""The modules that read the time themselves."""


@dataclass(frozen=True, slots=True)
class Group:
    """One Router with its target, whose passes `gpus` computes."""

    engine: Engine
    remote_drafter: RemoteDrafter
    gpus: Accelerator


class Twin:
    """Groups of the same pair, arm and settings. Within this context, product modules read its event loop's time.

    Attributes:
        num_gpus: of all groups and their drafts.
    """

    def __init__(
        self,
        models: Models,
        pair: Pair,
        arm: Arm,
        config: EngineConfig,
        costs: Costs,
        *,
        place: Place = "own",
        num_groups: int = 1,
        make_gpu: Callable[[], Accelerator] = Accelerator,
    ) -> None:
        """Make what drafts by `make_gpu`, unless drafts are made beside the target."""
        self.loop = VirtualLoop()
        self.groups: list[Group] = []
        self.draft_gpus: list[Accelerator] = []
        self.num_gpus = num_groups * pair.target.num_gpus
        self._models, self._pair, self._arm, self._config, self._costs = models, pair, arm, config, costs
        self._time = virtual_time(*TIMED)
        self._place, self._num_groups, self._make_gpu = place, num_groups, make_gpu

    def __enter__(self) -> Self:
        self._time.__enter__()
        self.run(self._start())
        return self

    def __exit__(self, *error: Any) -> None:
        self.run(self._end())
        self.loop.close()
        self._time.__exit__(*error)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def _end(self) -> None:
        """End the workers, and the rounds in flight, which would end at any later time and miss the loop."""
        for task in self._tasks:
            task.cancel()
        for group in self.groups:
            group.engine.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start(self) -> None:
        """Start all workers, and connect the Routers to them."""
        self._tasks = []
        shared = self._start_drafts(self._add_gpu(), self._num_groups) if self._place == "pool" else None
        for number in range(1, self._num_groups + 1):
            router, target, gpus = Process(), Process(), Accelerator()
            verifier = self._models.verifier(self._config, _pace(self._pair.target, target, gpus))
            target_worker = VirtualWorker(target, self._costs)
            responder = answer_verifications(verifier, self._config)
            self._serve(target_worker.serve(_answering(responder), responder.work))
            own_gpu = gpus if self._place == "beside" else None
            draft_worker = shared or self._start_drafts(own_gpu or self._add_gpu(), 1)
            engine, drafter, verifier = make_engine(self._arm, self._config, self._models.target.info, self.loop.time)
            verifier.connect([VirtualLink(router, target_worker, self._costs)])
            use(drafter, VirtualLink(router, draft_worker, self._costs, number))
            self.groups.append(Group(engine, drafter, gpus))

    def _start_drafts(self, gpu: Accelerator, num_groups: int) -> VirtualWorker:
        process = Process()
        pace = _pace(self._pair.draft, process, gpu)
        runs_ahead = self._arm.runs_ahead
        queue = self._models.drafts(self._config, pace, process.clock, run_ahead=runs_ahead, num_groups=num_groups)
        worker = VirtualWorker(process, self._costs)
        self._serve(worker.serve(lambda request, send: queue.submit(request.version, request, send), queue.step))
        return worker

    def _add_gpu(self) -> Accelerator:
        self.draft_gpus.append(self._make_gpu())
        self.num_gpus += self._pair.draft.num_gpus
        return self.draft_gpus[-1]

    def _serve(self, serving: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(serving))


def _pace(device: PacedDevice, process: Process, accelerator: Accelerator) -> Callable[[Backend], Backend]:
    """Return what gives a backend the pace of a device."""

    def pace(backend: Backend) -> Backend:
        paced: Any = PacedBackend(
            backend, device, clock=process.clock, sleep=process.sleep, accelerator=accelerator, spin_s=0.0
        )
        return paced

    return pace


def _answering(responder: TargetResponder) -> Answer:
    def answer(request: AnyRequest, send: Callable[[AnyReply], None]) -> None:
        if (reply := responder.answer(request)) is not None:
            send(reply)

    return answer
