"""Drafts: a draft worker as Serve calls it, over a worker without a model."""

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
from deployments.router.pooled_drafts import Drafts, Offer
from deployments.wire import UTILISATION
from engine.config import ModelConfig, ModelInfo
from engine.errors import TargetError
from tests.waiting import wait_for

TARGET = ModelConfig("/models/target")
INFO = ModelInfo("draft", 9, 9, [0], 1000, "float32", "cpu")


class Worker:
    """A worker that counts what is asked of it; `serve` lasts until it is closed."""

    utilisation, num_passes, num_proposals = 0.25, 3, 7

    def __init__(self) -> None:
        self.num_leases = 0
        self.is_hung = False
        self._is_closed = threading.Event()

    def lease(self, identity: str, num_rows: int) -> Lease:
        self.num_leases += 1
        return Lease("a", self.num_leases, Endpoint("node", "", "127.0.0.1", 1, ""), INFO)

    def end_one(self) -> None:
        self.num_leases -= 1

    def check(self) -> None:
        if self.is_hung:
            raise TargetError("a pass takes too long")

    def serve(self) -> None:
        self._is_closed.wait()

    def close(self) -> None:
        self._is_closed.set()


@pytest.fixture
async def drafts() -> Any:
    drafts: Any = object.__new__(Drafts)
    drafts._id, drafts._target, drafts._worker = "a", TARGET, Worker()
    drafts._serving = asyncio.create_task(asyncio.to_thread(drafts._worker.serve))
    yield drafts
    drafts._worker.close()
    await drafts._serving


async def test_only_the_worker_that_is_named_is_leased(drafts: Any) -> None:
    assert await drafts.lease("b", TARGET, "router", 8) is None
    assert drafts._worker.num_leases == 0
    lease = await drafts.lease("a", TARGET, "router", 8)
    assert (lease.worker, await drafts.offer()) == ("a", Offer("a", 1, 0.25))


@pytest.mark.parametrize("target", [ModelConfig("/models/other"), replace(TARGET, revision="two")])
async def test_a_router_of_another_target_gets_no_lease(target: ModelConfig, drafts: Any) -> None:
    """Its token ids may be none of the draft's."""
    with pytest.raises(TargetError, match=f"drafts for /models/target, not for {target.path}"):
        await drafts.lease("a", target, "router", 8)
    assert drafts._worker.num_leases == 0


async def test_a_worker_that_ends_or_hangs_is_replaced(drafts: Any) -> None:
    await drafts.check_health()
    drafts._worker.is_hung = True
    with pytest.raises(TargetError, match="takes too long"):
        await drafts.check_health()
    drafts._worker.is_hung = False
    drafts._worker.close()
    await drafts._serving
    with pytest.raises(TargetError, match="has ended"):
        await drafts.check_health()


async def test_a_kill_ends_the_worker_that_is_named_once_the_answer_has_left(
    drafts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(pooled_drafts, "ANSWER_S", 0.0)
    monkeypatch.setattr(os, "kill", lambda *call: killed.append(call))
    assert await drafts.kill("a")
    assert not killed
    assert not await drafts.kill("b")
    await wait_for(lambda: killed == [(os.getpid(), signal.SIGKILL)])


async def test_its_metrics_and_what_the_autoscaler_gets(drafts: Any) -> None:
    drafts._worker.num_leases = 2
    collected = await drafts.collect()
    samples = {sample.name: sample.value for metric in collected.metrics for sample in metric.samples}
    assert collected.replica == "a"
    assert samples == {
        "paceline:draft_pool_leases": 2,
        "paceline:draft_pool_utilisation": 0.25,
        "paceline:draft_pool_passes_total": 3,
        "paceline:draft_pool_proposals_total": 7,
    }
    assert drafts.record_autoscaling_stats() == {UTILISATION: 0.25}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the pool's workers answer; leases are balanced at once, until there are no more answers."""
    rounds: list[Any] = []

    async def ask_all(handle: object, method: str) -> Any:
        assert method == "offer"
        if not rounds:
            await asyncio.Event().wait()
        return rounds.pop(0)

    monkeypatch.setattr(pooled_drafts, "BALANCE_PERIOD_S", 0.0)
    monkeypatch.setattr(pooled_drafts, "ask_all", ask_all)
    return rounds


@pytest.mark.parametrize(
    ("num_leases", "answers", "expected"),
    [
        (3, [Offer("a", 3, 0.0), Offer("b", 1, 0.0)], 2),
        (3, [Offer("a", 3, 0.0), Offer("b", 2, 0.0)], 3),
        (2, [Offer("b", 0, 0.0), Offer("c", 5, 0.0)], 1),
        (3, [TimeoutError(), Offer("a", 3, 0.0)], 3),
        (1, [], 1),
    ],
    ids=["two fewer", "one fewer", "a new worker", "no answer", "alone"],
)
async def test_a_worker_gives_a_lease_to_one_with_two_fewer(
    num_leases: int, answers: list[Any], expected: int, drafts: Any, quick: list[Any]
) -> None:
    drafts._all, drafts._worker.num_leases = None, num_leases
    quick.append(answers)
    task = asyncio.create_task(drafts._keep_balanced())
    await wait_for(lambda: not quick)
    await asyncio.sleep(0)
    task.cancel()
    assert drafts._worker.num_leases == expected
