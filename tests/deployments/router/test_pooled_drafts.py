"""Draft workers as Serve calls them, over workers without a model, and which of them a Router leases."""

import asyncio
import os
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest

from cluster.leases import Lease
from cluster.transport import Endpoint
from deployments.router import pooled_drafts
from deployments.router.pooled_drafts import Drafts, Offer, ServeLeases
from deployments.wire import UTILISATION
from engine.config import ModelConfig, ModelInfo
from engine.errors import TargetError
from tests.waiting import wait_for

TARGET = ModelConfig("/models/target")
INFO = ModelInfo("draft", 9, 9, [0], 1000, "float32", "cpu")
ENDPOINT = Endpoint("node", "", "127.0.0.1", 1, "")


class Worker:
    """A worker that counts its leases; `serve` lasts until it is closed."""

    num_passes, num_proposals = 3, 7
    learned = dict.fromkeys(("taken", "dropped", "undone", "accepted_before", "accepted_after"), 0) | {
        "tokens": 640,
        "steps": 1,
    }

    def __init__(self, name: str = "a", num_leases: int = 0, *, room: int = 9, utilisation: float = 0.25) -> None:
        self.name, self.num_leases, self.room, self.utilisation = name, num_leases, room, utilisation
        self.problem: str | None = None
        self._is_closed = threading.Event()

    def lease(self, identity: str, num_rows: int) -> Lease:
        if self.num_leases == self.room:
            raise TargetError(f"{self.name} is full")
        self.num_leases += 1
        return Lease(self.name, self.num_leases, ENDPOINT, INFO)

    def end_one(self) -> None:
        self.num_leases -= 1

    def check(self) -> None:
        if self.problem is not None:
            raise TargetError(self.problem)

    def serve(self) -> None:
        self._is_closed.wait()

    def close(self) -> None:
        self._is_closed.set()


def drafts_of(worker: Worker) -> Any:
    drafts: Any = object.__new__(Drafts)
    drafts._id, drafts._target, drafts._worker = worker.name, TARGET, worker
    return drafts


@pytest.fixture
async def drafts() -> Any:
    drafts = drafts_of(Worker())
    drafts._serving = asyncio.create_task(asyncio.to_thread(drafts._worker.serve))
    yield drafts
    drafts._worker.close()
    await drafts._serving


async def test_a_worker_is_leased_by_its_name_for_its_target(drafts: Any) -> None:
    """The token ids of another target may be none of the draft's."""
    assert await drafts.lease("b", TARGET, "router", 8) is None
    for other in (ModelConfig("/models/other"), replace(TARGET, revision="two")):
        with pytest.raises(TargetError, match=f"drafts for /models/target, not for {other.path}"):
            await drafts.lease("a", other, "router", 8)
    assert drafts._worker.num_leases == 0
    lease = await drafts.lease("a", TARGET, "router", 8)
    assert (lease.worker, await drafts.offer()) == ("a", Offer("a", 1, 0.25))


async def test_a_worker_that_ends_or_hangs_is_replaced(drafts: Any) -> None:
    await drafts.check_health()
    drafts._worker.problem = "a pass takes too long"
    with pytest.raises(TargetError, match="takes too long"):
        await drafts.check_health()
    drafts._worker.problem = None
    drafts._worker.close()
    await drafts._serving
    with pytest.raises(TargetError, match="has ended"):
        await drafts.check_health()


async def test_its_metrics_and_what_the_autoscaler_gets(drafts: Any) -> None:
    drafts._worker.num_leases = 2
    collected = await drafts.collect()
    samples = {sample.name: sample.value for metric in collected.metrics for sample in metric.samples}
    learned = {name: samples.pop(name) for name in [*samples] if "learning" in name}
    assert collected.replica == "a"
    assert samples == {
        "paceline:draft_pool_leases": 2,
        "paceline:draft_pool_utilisation": 0.25,
        "paceline:draft_pool_passes_total": 3,
        "paceline:draft_pool_proposals_total": 7,
    }
    assert learned["paceline:draft_learning_tokens_total"] == 640
    assert drafts.record_autoscaling_stats() == {UTILISATION: 0.25}


@pytest.mark.parametrize(
    ("num_leases", "answers", "expected"),
    [
        (3, [Offer("a", 3, 0.0), Offer("b", 1, 0.0)], 2),
        (3, [Offer("a", 3, 0.0), Offer("b", 2, 0.0)], 3),
        (3, [TimeoutError(), Offer("a", 3, 0.0)], 3),
        (1, [], 1),
    ],
    ids=["two fewer", "one fewer", "no answer", "alone"],
)
async def test_a_worker_gives_a_lease_to_a_worker_with_two_fewer(
    num_leases: int, answers: list[Any], expected: int, drafts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [answers]

    async def ask_all(handle: object, method: str) -> Any:
        assert method == "offer"
        if not rounds:
            await asyncio.Event().wait()
        return rounds.pop()

    monkeypatch.setattr(pooled_drafts, "BALANCE_PERIOD_S", 0.0)
    monkeypatch.setattr(pooled_drafts, "ask_all", ask_all)
    drafts._all, drafts._worker.num_leases = None, num_leases
    task = asyncio.create_task(drafts._keep_balanced())
    await wait_for(lambda: not rounds)
    await asyncio.sleep(0)
    task.cancel()
    assert drafts._worker.num_leases == expected


class Pool:
    """A pool whose worker "lost" never answers, as `ask_all` asks it; and the processes that were killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *workers: Worker) -> None:
        self.workers, self.killed = workers, list[Any]()
        monkeypatch.setattr(pooled_drafts, "ask_all", self._ask)
        monkeypatch.setattr(pooled_drafts, "ANSWER_S", 0.01)
        monkeypatch.setattr(os, "kill", lambda *call: self.killed.append(call))
        self.leases = ServeLeases(None, TARGET)

    async def _ask(self, _: object, method: str, *call: Any) -> list[Any]:
        answering = [drafts_of(worker) for worker in self.workers if worker.name != "lost"]
        calls = (getattr(drafts, method)(*call) for drafts in answering)
        return [TimeoutError(), *await asyncio.gather(*calls, return_exceptions=True)]


@pytest.mark.parametrize(
    ("workers", "avoid", "taken"),
    [
        ([Worker("a", 2), Worker("b", 1), Worker("c", 3)], (), "b"),
        ([Worker("a", 1, utilisation=0.9), Worker("b", 1, utilisation=0.2)], (), "b"),
        ([Worker("a"), Worker("b", 5)], ("a",), "b"),
        ([Worker("a"), Worker("b", 5, room=5)], ("a",), "a"),
        ([Worker("full", 1, room=1), Worker("lost"), Worker("c", 4)], (), "c"),
    ],
    ids=["fewest leases", "drafts less", "not failed", "failed, the others full", "full, lost"],
)
async def test_a_router_leases_the_worker_that_has_most_room(
    workers: list[Worker], avoid: tuple[str, ...], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {worker.name: worker.num_leases for worker in workers}
    lease = await Pool(monkeypatch, *workers).leases.take("router", 8, avoid)
    assert lease.worker == taken
    assert [worker.name for worker in workers if worker.num_leases > before[worker.name]] == [taken]


async def test_the_error_says_why_no_worker_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    for workers, message in (((), "no draft worker of the pool answers"), ((Worker("a", 1, room=1),), "a is full")):
        with pytest.raises(TargetError, match=message):
            await Pool(monkeypatch, *workers).leases.take("router", 8, ())


async def test_the_worker_of_a_lease_is_killed_once_its_answer_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, Worker("a"), Worker("b", 1))
    lease = await pool.leases.take("router", 8, ())
    assert await pool.leases.kill(lease)
    assert not pool.killed
    await wait_for(lambda: pool.killed == [(os.getpid(), signal.SIGKILL)])
    assert not await pool.leases.kill(replace(lease, worker="c"))
