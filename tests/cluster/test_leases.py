"""How a group keeps a lease of a draft worker that is killed or hangs; tests/e2e/replicated has real ones."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest

from cluster import leases as leases_module
from cluster import remote_drafter as remote_module
from cluster.leases import Lease, keep_lease
from cluster.remote_drafter import RemoteDrafter
from cluster.transport import Endpoint
from engine.errors import TargetError
from tests.cluster.fakes import EchoDrafter, FakeLink, echo_worker, propose_row
from tests.cluster.wire import NODE_ID
from tests.waiting import wait_for


class Rig:
    """A drafter whose leases are of fake workers, by name; `links` are those of its leases."""

    def __init__(self, *names: str) -> None:
        self.names, self.avoided = names, list[set[str]]()
        self.identity, self.links, self.taken = "me", list[FakeLink](), list[str]()
        self.keeps_leases = False
        self.drafter = RemoteDrafter(vocab_size=100, timeout_s=0.2)
        self.echo = EchoDrafter()

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        assert (identity, num_rows) == ("me", 4)
        self.avoided.append(set(avoid))
        for name in sorted(self.names, key=lambda name: name in avoid):
            version = len(self.links) if self.keeps_leases and self.links else len(self.links) + 1
            return Lease(name, version, Endpoint(NODE_ID, "", "", 0, ""), None)
        raise TargetError("no worker has room now")

    def connect(self, endpoint: Endpoint, *, version: int, on_break) -> FakeLink:
        answer = echo_worker(self.echo, capacity=4, version=version)
        self.links.append(FakeLink(answer, version=version, on_break=on_break))
        return self.links[-1]

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        task = asyncio.create_task(
            keep_lease(self, self, self.drafter, 4, lambda lease: self.taken.append(lease.worker))
        )
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def propose(self, *tokens: int) -> list[int]:
        return (await self.drafter.propose([propose_row("a", tokens)]))[0].token_ids


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "_FIRST_RETRY_S", 0.01)


async def test_a_lease_that_breaks_is_replaced_by_one_of_another_worker_which_gets_the_whole_text():
    rig = Rig("one", "two")
    async with rig.kept():
        await wait_for(lambda: rig.drafter.is_available)
        assert await rig.propose(1, 2, 3) == [1, 2, 3]
        rig.links[0].break_connection("it was killed")
        await wait_for(lambda: rig.taken == ["one", "two"] and rig.drafter.is_available)
        assert rig.avoided == [set(), {"one"}]
        assert await rig.propose(1, 2, 3, 4) == [2, 3, 4]
    assert not rig.drafter.is_available


async def test_a_worker_that_hangs_costs_one_wait_and_is_not_waited_for_again():
    rig = Rig("one", "two")
    async with rig.kept():
        await wait_for(lambda: rig.drafter.is_available)
        rig.links[0].faults = ["lose"]
        assert await rig.propose(1, 2, 3) == []
        assert not rig.drafter.is_available
        await wait_for(lambda: rig.taken == ["one", "two"])
        assert await rig.propose(1, 2, 3) == [1, 2, 3]
    assert rig.drafter.fallbacks == {"timeout": 1}
    assert [type(request).__name__ for request in rig.links[0].requests] == ["Ping", "Propose"]


async def test_a_worker_that_answers_no_ping_while_no_round_runs_is_replaced(monkeypatch):
    monkeypatch.setattr(leases_module, "_PING_PERIOD_S", 0.01)
    monkeypatch.setattr(remote_module, "_PING_DEADLINE_S", 0.05)
    rig = Rig("one", "two")
    async with rig.kept():
        await wait_for(lambda: rig.drafter.is_available)
        rig.links[0].faults = [None] * 3 + ["lose"] * 9
        await wait_for(lambda: rig.taken == ["one", "two"])
        assert len(rig.links[0].requests) in (5, 6)  # the first before it is used


async def test_a_lease_that_goes_on_after_a_failure_keeps_its_connection_and_the_texts_that_the_worker_has():
    """The worker is used again once it replies to a ping, and learns then which requests have ended meanwhile."""
    rig = Rig("one")
    rig.keeps_leases = True
    async with rig.kept():
        await wait_for(lambda: rig.drafter.is_available)
        await rig.propose(1, 2, 3)
        rig.links[0].faults = ["lose"]
        rig.drafter.release("b")
        assert await rig.propose(1, 2, 3, 4) == []
        await wait_for(lambda: rig.drafter.is_available)
        assert await rig.propose(1, 2, 3, 4, 5) == [3, 4, 5]
    assert rig.taken == ["one"]
    assert [entry.prefix.offset for request in rig.links[0].requests[-1:] for entry in request.rows] == [3]
    assert len(rig.links) == 1


async def test_no_room_anywhere_is_asked_again_while_rounds_go_without_drafts(caplog):
    caplog.set_level(logging.WARNING, "cluster.leases")
    rig = Rig()
    async with rig.kept():
        await wait_for(lambda: len(rig.avoided) == 2)
        assert await rig.propose(1, 2, 3) == []
        rig.names = ("late",)
        await wait_for(lambda: rig.drafter.is_available)
    assert rig.drafter.fallbacks == {"absent": 1}
    assert "next try in 0.01 s: no worker has room now" in caplog.text
