"""How a group keeps a lease; and four groups on one draft worker that is killed, hangs, or becomes slow."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from cluster import leases as leases_module
from cluster import remote_drafter as remote_module
from cluster import round_times
from cluster.config import GroupConfig
from cluster.leases import Lease, keep_lease
from cluster.remote_drafter import RemoteDrafter
from cluster.transport import Connector, Endpoint
from engine.config import EngineConfig, ModelConfig
from engine.drafting.assembly import assemble
from engine.engine import Engine
from engine.errors import TargetError
from engine.models.registry import open_model
from engine.params import SamplingParams
from engine.protocols import NoDrafter
from tests.cluster.draft_process import DraftProcess, Workers, workers_of
from tests.cluster.fakes import EchoDrafter, FakeLink, echo_worker, propose_row
from tests.cluster.wire import NODE_ID
from tests.models import save_llama
from tests.waiting import wait_for

Texts = dict[str, list[int]]


class Rig:
    """A drafter whose leases are of fake workers, by name; `links` are those of its leases."""

    def __init__(self, *names: str) -> None:
        self.names, self.avoided = names, list[set[str]]()
        self.identity, self.links, self.taken = "me", list[FakeLink](), list[str]()
        self.drafter = RemoteDrafter(vocab_size=100, timeout_s=0.2)
        self.echo = EchoDrafter()

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        assert (identity, num_rows) == ("me", 4)
        self.avoided.append(set(avoid))
        for name in sorted(self.names, key=lambda name: name in avoid):
            return Lease(name, len(self.links) + 1, Endpoint(NODE_ID, "", "", 0, ""), None)
        raise TargetError("no worker has room now")

    def connect(self, endpoint: Endpoint, *, version: int, on_break) -> FakeLink:
        answer = echo_worker(self.echo, capacity=4, version=version)
        self.links.append(FakeLink(answer, version=version, on_break=on_break))
        return self.links[-1]

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        task = asyncio.create_task(keep_lease(self, self, self.drafter, 4, lambda one: self.taken.append(one.worker)))
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
    assert [type(one).__name__ for one in rig.links[0].requests] == ["Ping", "Propose"]


async def test_a_worker_that_answers_no_ping_while_no_round_runs_is_replaced(monkeypatch):
    monkeypatch.setattr(leases_module, "_PING_PERIOD_S", 0.01)
    monkeypatch.setattr(remote_module, "_PING_DEADLINE_S", 0.05)
    rig = Rig("one", "two")
    async with rig.kept():
        await wait_for(lambda: rig.drafter.is_available)
        rig.links[0].faults = [None] * 3 + ["lose"] * 9
        await wait_for(lambda: rig.taken == ["one", "two"])
        assert len(rig.links[0].requests) in (5, 6)  # the first before it is used


async def test_the_only_worker_is_leased_again_after_it_failed():
    rig = Rig("one")
    async with rig.kept():
        for number in range(3):
            await wait_for(lambda number=number: len(rig.taken) == number + 1 and rig.drafter.is_available)
            rig.links[-1].break_connection("it was killed")
    assert rig.avoided[:2] == [set(), {"one"}]


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


ENGINE = EngineConfig(
    num_speculative_tokens=3, max_num_seqs=4, num_blocks=3000, block_size=4, speculation="fixed", verification="coupled"
)
NUM_GROUPS = 4


class Group:
    """An engine with a target in this process, and a draft worker of the workers."""

    def __init__(self, config: GroupConfig, number: int, workers: Workers | None) -> None:
        self.workers, self.number = workers, number
        self.drafter = RemoteDrafter(timeout_s=1.0)
        target = assemble(open_model(config.target), None, config.engine).load_verifier()
        self.drafter.vocab_size = target.backend.info.vocab_size
        self.engine = Engine(
            config.engine,
            target.backend.info,
            drafter=NoDrafter() if workers is None else self.drafter,
            verifier=target,
            num_blocks=target.num_blocks,
            overlaps=("ahead",) if config.run_ahead == "on" else (),
        )

    async def run(self, max_tokens: int) -> Texts:
        keeping = None
        if self.workers is not None:
            keeping = asyncio.create_task(keep_lease(self.workers, Connector(NODE_ID), self.drafter, 4, lambda _: None))
            await wait_for(lambda: self.drafter.is_available)
        texts: Texts = {}
        for i, temperature in enumerate((0.0, 0.8, 1.0)):
            params = SamplingParams(temperature=temperature, seed=self.number, max_tokens=max_tokens, ignore_eos=True)
            self.engine.add(str(i), [5 + self.number] * (3 + 20 * i), params)
            texts[str(i)] = []
        while self.engine.has_work:
            for output in await self.engine.step():
                texts[output.request_id] += output.token_ids
            await asyncio.sleep(0)
        if keeping is not None:
            keeping.cancel()
        return texts


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> GroupConfig:
    folder = tmp_path_factory.mktemp("models")
    target = save_llama(folder / "target", seed=1)
    draft = save_llama(folder / "draft", seed=1, noise=0.02)
    models = (ModelConfig(str(path), dtype="float32", device="cpu", num_threads=1) for path in (target, draft))
    return GroupConfig(*models, ENGINE, run_ahead="off", draft_pool=True)


@pytest.fixture(scope="module")
async def undrafted(config: GroupConfig) -> list[Texts]:
    return [await Group(config, number, None).run(160) for number in range(NUM_GROUPS)]


@pytest.fixture(scope="module", params=["off", "on"])
def workers(request: pytest.FixtureRequest, config: GroupConfig) -> Iterator[Workers]:
    with workers_of(replace(config, run_ahead=request.param), "first", "second") as workers:
        yield workers


def nothing(_: DraftProcess) -> None:
    pass


def slow_down(worker: DraftProcess) -> None:
    worker.delay_s.value = 0.8


def hang(worker: DraftProcess) -> None:
    worker.signal(signal.SIGSTOP)


def kill(worker: DraftProcess) -> None:
    worker.signal(signal.SIGKILL)


@pytest.mark.e2e
@pytest.mark.parametrize("fault", [nothing, slow_down, hang, kill])
async def test_four_groups_write_their_texts_whatever_happens_to_their_draft_worker(
    config, workers, undrafted, fault, monkeypatch
):
    """After the fault each group waits for the worker at most once, and goes on with drafts of the other one."""
    # The groups of this test take turns in one thread and wait for each other, and other processes use its cores.
    monkeypatch.setattr(round_times, "_LEAST_DRAFT_S", 0.9)
    run_ahead = workers.config.run_ahead
    groups = [Group(replace(config, run_ahead=run_ahead), number, workers) for number in range(NUM_GROUPS)]
    workers.taken.clear()
    running = asyncio.gather(*(group.run(160) for group in groups))
    await wait_for(lambda: all(group.engine.stats.num_drafts > 20 for group in groups))
    before = [group.engine.stats.num_accepted_tokens for group in groups]
    fault(workers.processes[0])
    assert await running == undrafted
    fallbacks = [group.drafter.fallbacks for group in groups]
    if fault is not kill:
        workers.processes[0].delay_s.value = 0.0
        workers.processes[0].signal(signal.SIGCONT)
    assert all(group.engine.stats.num_accepted_tokens > before[group.number] for group in groups)
    others = 0 if fault is nothing else NUM_GROUPS
    assert [name for _, name in workers.taken] == ["first"] * NUM_GROUPS + ["second"] * others
    waits = int(fault in (slow_down, hang))
    assert [(one["timeout"], one["failure"], one["malformed"]) for one in fallbacks] == [(waits, 0, 0)] * NUM_GROUPS
    # With "on", four targets as fast as these leave the worker no time to prepare anything; see test_draft_workers.
