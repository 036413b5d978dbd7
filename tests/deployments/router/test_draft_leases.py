"""Leases over Serve's handle: which worker of the pool is taken, and what is said if none is."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.leases import Lease
from cluster.transport import Endpoint
from deployments.router.pooled_drafts import Offer, ServeLeases
from engine.config import ModelConfig, ModelInfo
from engine.errors import TargetError

TARGET = ModelConfig("/models/target")
INFO = ModelInfo("draft", 9, 9, [0], 1000, "float32", "cpu")


class Replica:
    """A draft worker of the pool: its leases, its room, and the clients that have leased it."""

    def __init__(self, worker: str, num_leases: int = 0, *, room: int = 9, utilisation: float = 0.0) -> None:
        self.worker, self.num_leases, self.room, self.utilisation = worker, num_leases, room, utilisation
        self.is_dead = self.is_killed = False
        self.clients: list[str] = []

    def offer(self) -> Offer:
        return Offer(self.worker, self.num_leases, self.utilisation)

    def lease(self, worker: str, target: ModelConfig, identity: str, num_rows: int) -> Lease | None:
        if worker != self.worker:
            return None
        assert (target, num_rows) == (TARGET, 8)
        if self.num_leases == self.room:
            raise TargetError(f"{self.worker} is full")
        self.num_leases += 1
        self.clients.append(identity)
        return Lease(worker, self.num_leases, Endpoint("node", "", "127.0.0.1", 1, ""), INFO)

    def kill(self, worker: str) -> bool:
        self.is_killed = worker == self.worker
        return self.is_killed


class Handle:
    """Serve's handle to these replicas, with its real response."""

    def __init__(self, *replicas: Replica) -> None:
        self._replicas = replicas

    def broadcast(self, method: str, *args: Any) -> DeploymentBroadcastResponse:
        async def call(replica: Replica) -> Any:
            if replica.is_dead:
                raise TargetError("gone")
            return getattr(replica, method)(*args)

        async def calls() -> list[Any]:
            return [SimpleNamespace(get_async=lambda one=one: call(one)) for one in self._replicas]

        return DeploymentBroadcastResponse(calls(), asyncio.get_running_loop())


async def take(*replicas: Replica, avoid: tuple[str, ...] = ()) -> str:
    return (await ServeLeases(Handle(*replicas), TARGET).take("router", 8, avoid)).worker


LOST = Replica("lost")
LOST.is_dead = True


@pytest.mark.parametrize(
    ("replicas", "avoid", "taken"),
    [
        ([Replica("a", 2), Replica("b", 1), Replica("c", 3)], (), "b"),
        ([Replica("a", 1, utilisation=0.9), Replica("b", 1, utilisation=0.2)], (), "b"),
        ([Replica("a"), Replica("b", 5)], ("a",), "b"),
        ([Replica("a"), Replica("b", 5, room=5)], ("a",), "a"),
        ([Replica("a")], ("a",), "a"),
        ([Replica("full", 1, room=1), LOST, Replica("c", 4)], (), "c"),
    ],
    ids=["fewest leases", "drafts less", "not failed", "failed, the others full", "failed, alone", "full, lost"],
)
async def test_one_worker_is_leased_and_only_that_one(
    replicas: list[Replica], avoid: tuple[str, ...], taken: str
) -> None:
    assert await take(*replicas, avoid=avoid) == taken
    assert [replica.worker for replica in replicas if replica.clients] == [taken]


async def test_routers_spread_over_the_pool() -> None:
    replicas = [Replica("a"), Replica("b"), Replica("c")]
    leases = ServeLeases(Handle(*replicas), TARGET)
    for number in range(6):
        await leases.take(str(number), 8, ())
    assert [replica.num_leases for replica in replicas] == [2, 2, 2]


async def test_the_error_says_why_no_worker_is_leased() -> None:
    with pytest.raises(TargetError, match="no draft worker of the pool answers"):
        await take()
    with pytest.raises(TargetError, match="a is full"):
        await take(Replica("a", 1, room=1))


async def test_the_worker_of_a_lease_can_be_killed() -> None:
    replicas = [Replica("a"), Replica("b", 1)]
    leases = ServeLeases(Handle(*replicas), TARGET)
    lease = await leases.take("router", 8, ())
    assert await leases.kill(lease)
    assert [replica.is_killed for replica in replicas] == [True, False]
    assert not await ServeLeases(Handle(Replica("c")), TARGET).kill(lease)
