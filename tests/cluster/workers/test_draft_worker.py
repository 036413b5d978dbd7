"""A draft worker over real sockets: its leases, who may use them, and when they end."""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import threading
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cluster.config import GroupConfig
from cluster.protocol.messages import Ping, Pong, PrefixDelta, Propose, ProposeEntry
from cluster.remote_drafter import RemoteDrafter
from cluster.transport import Connector, TransportError
from cluster.workers import draft_worker
from cluster.workers.draft_worker import DraftWorker
from engine.config import EngineConfig, ModelConfig
from engine.drafting.assembly import assemble
from engine.drafting.learning import lessons, study
from engine.drafting.learning.head_learner import HeadLearner
from engine.engine import Engine
from engine.errors import TargetError
from engine.models.registry import open_model
from engine.params import SamplingParams
from engine.protocols import Drafter, NoDrafter
from engine.stats.preparation import PREPARATION
from tests.cluster.wire import NODE_ID, in_thread
from tests.engine.heads.saved_heads import save_head
from tests.models import save_llama
from tests.waiting import wait_for

NODE = "127.0.0.1", NODE_ID
ENGINE = EngineConfig(num_speculative_tokens=3, max_num_seqs=4, block_size=4, num_blocks=600)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> GroupConfig:
    path = save_llama(tmp_path_factory.mktemp("models") / "model", seed=1)
    model = ModelConfig(str(path), dtype="float32", device="cpu", num_threads=1)
    return GroupConfig(model, model, ENGINE, draft_pool=True, run_ahead="off", hang_timeout_s=0.2)


@pytest.fixture
def worker(config):
    worker = DraftWorker(config, "worker 1", max_groups=4, node=NODE)
    worker.load()
    with in_thread(worker):
        yield worker


def test_the_facts_of_several_drafts_are_those_of_all(config: GroupConfig, tmp_path: Path) -> None:
    other, draft = str(save_llama(tmp_path / "other", seed=2)), config.draft
    assert draft is not None
    one, two = (
        DraftWorker(replace(config, draft=each), "worker 1", node=NODE)
        for each in (draft, replace(draft, others=(other,)))
    )
    alone, both = one.load(), two.load()
    assert both == replace(alone, name=f"{draft.path}, {other}", num_parameters=2 * alone.num_parameters)
    for worker in (one, two):
        worker.close()


class Client:
    """A Router with a lease, and the breaks of its connection."""

    def __init__(self, worker: DraftWorker, node_id: str = NODE_ID) -> None:
        self.breaks: list[str] = []
        connector = Connector(node_id)
        self.lease = worker.lease(connector.identity, 4)
        self.link = self.connect(connector)

    def connect(self, connector: Connector):
        return connector.connect(self.lease.endpoint, version=self.lease.version, on_break=self.breaks.append)

    async def propose(self, number: int = 1):
        entry = ProposeEntry(PrefixDelta("a", 0, [5, 6, 7], 3, SamplingParams(temperature=0)), 3)
        return await self.link.begin(Propose(number, self.lease.version, 30.0, [], [entry]))

    def ping(self, number: int = 9, deadline_s: float = 30.0) -> Ping:
        return Ping(number, self.lease.version, deadline_s, [])


@pytest.fixture
async def client(worker):
    """What makes a client of the worker; its link is closed afterwards."""
    clients: list[Client] = []

    def make(node_id: str = NODE_ID) -> Client:
        clients.append(Client(worker, node_id))
        return clients[-1]

    yield make
    for made in clients:
        made.link.close()


def identity() -> str:
    return Connector(NODE_ID).identity


async def test_several_clients_get_their_drafts_each_by_its_own_lease(worker, client):
    clients = [client() for _ in range(3)]
    assert len({each.lease.version for each in clients}) == worker.num_leases == 3
    assert clients[0].lease.worker == "worker 1"
    assert clients[0].lease.info.vocab_size == 64
    drafts = [(await (await each.propose())).drafts for each in clients]
    assert drafts[0] == drafts[1] == drafts[2]
    assert len(drafts[0][0].token_ids) == 3
    assert worker.num_proposals == 3
    assert 1 <= worker.num_passes <= 3
    assert 0 < worker.utilisation < 1


async def test_a_lease_is_for_one_client_from_this_node_or_another(client):
    remote = client("another node")
    with pytest.raises(TransportError):
        await remote.connect(Connector("another node")).call(remote.ping(deadline_s=0.5))
    assert isinstance(await remote.link.call(remote.ping()), Pong)


async def test_a_lease_ends_when_its_router_is_silent_and_leaves_its_room_to_others(worker, client, monkeypatch):
    monkeypatch.setattr(draft_worker, "LEASE_S", 0.3)
    silent, lively = client(), client()
    await (await silent.propose())
    number = 0
    while worker.num_leases > 1 or not silent.breaks:  # a worker without messages ends no lease
        number += 1
        await lively.link.call(lively.ping(number))
    assert not worker._queue.caches[0].prefixes
    assert (await (await lively.propose(10**6))).drafts[0].token_ids


async def test_the_latest_lease_can_be_ended_and_its_router_learns_of_it_at_once(worker, client):
    clients = [client(), client()]
    for each in clients:
        await each.link.call(each.ping())
    worker.end_one()
    assert worker.num_leases == 1
    await wait_for(lambda: clients[1].breaks)
    assert not clients[0].breaks
    worker.end_one()
    worker.end_one()
    await wait_for(lambda: clients[0].breaks)


def test_a_lease_that_does_not_fit_is_refused_with_the_numbers(worker):
    """A context of 512 + 3 tokens takes 129 blocks, and each of 4 rows one more."""
    for _ in range(4):
        worker.lease(identity(), 4)
    with pytest.raises(TargetError, match="worker 1 has 600 KV blocks; 4 leases and one of 4 rows need 665"):
        worker.lease(identity(), 4)
    worker.end_one()
    worker.lease(identity(), 4)


def test_a_client_goes_on_with_its_lease_until_that_ends_and_the_first_one_always_fits(worker):
    first = identity()
    lease = worker.lease(first, 10**6)
    assert worker.lease(first, 4) is lease
    with pytest.raises(TargetError, match="1 leases and one of 4 rows"):
        worker.lease(identity(), 4)
    worker.end_one()
    assert worker.lease(first, 4).version == lease.version + 1
    assert worker.num_leases == 1
    worker.close()
    with pytest.raises(TargetError, match="worker 1 ends"):
        worker.lease(first, 4)


async def test_a_pass_that_hangs_is_noticed(worker, client, monkeypatch):
    worker.check()
    may_go_on, run = threading.Event(), worker._backends[0].run
    monkeypatch.setattr(worker._backends[0], "run", lambda *arguments: (may_go_on.wait(30), run(*arguments))[1])
    call = await client().propose()

    def is_hanging() -> bool:
        with contextlib.suppress(TargetError):
            worker.check()
            return False
        return True

    await wait_for(is_hanging)
    with pytest.raises(TargetError, match=r"draft worker worker 1 computes for longer than 0.2 s"):
        worker.check()
    may_go_on.set()
    assert (await call).drafts
    await wait_for(lambda: not is_hanging())


def test_the_cache_takes_what_four_groups_can_use(config):
    worker = DraftWorker(replace(config, engine=replace(ENGINE, num_blocks=None)), "1", max_groups=4, node=NODE)
    worker.load()
    assert worker._engine.num_blocks == 129 * 4 * 4
    short = DraftWorker(replace(config, engine=replace(ENGINE, max_model_len=61)), "1", max_groups=4, node=NODE)
    short.load()
    for _ in range(600 // (16 + 4)):
        short.lease(identity(), 4)


async def test_a_worker_learns_from_ended_texts_and_keeps_what_it_learned(config, tmp_path, monkeypatch):
    """Weights that any judge would take are taken, while requests go on; nothing is compiled or lost meanwhile."""
    path, steps, policies, intervals = tmp_path / "learned", [], [], []

    def schedule(_: int, policy: int, __: os.sched_param) -> None:
        policies.append((threading.current_thread().name, policy))

    monkeypatch.setattr(study.os, "sched_setscheduler", schedule)
    monkeypatch.setattr(study.sys, "setswitchinterval", intervals.append)
    monkeypatch.setattr(lessons, "STEP_TOKENS", 64)
    monkeypatch.setattr(study, "MIN_HELD_OUT", 4)
    monkeypatch.setattr(study, "JUDGED_EVERY", 2)
    monkeypatch.setattr(study, "judge", lambda *_: steps.append(1) or "taken")
    settings = {"draft_learning": "on", "draft_learning_share": 1.0, "draft_learning_path": path}
    worker = DraftWorker(replace(config, **settings), "worker 1", max_groups=2, node=NODE)
    worker.load()
    before = dict(PREPARATION.counts)
    params = SamplingParams(temperature=0.5, seed=1, learning_group="")
    with in_thread(worker):
        client = Client(worker)

        async def propose(number: int) -> None:
            entry = ProposeEntry(PrefixDelta(str(number), 0, [5, 6, *range(3, 43)], 2, replace(params, seed=number)), 3)
            released = [str(number - 1)] if 0 < number <= 100 else []
            call = await client.link.begin(Propose(number + 1, client.lease.version, 30.0, released, [entry]))
            assert len((await call).drafts[0].token_ids) == 3

        number = 0
        while worker.learned["taken"] < 2 or not path.exists():
            await propose(number)
            number += 1
            await asyncio.sleep(0.01 * (number > 100))
            if worker._study.watch.is_watching:
                worker._study.watch._before = None
        client.link.close()
    assert policies == [("learning", os.SCHED_IDLE)]
    assert intervals[0] < 1e-3
    assert worker.learned["tokens"] >= 128
    assert dict(PREPARATION.counts) == before
    other = DraftWorker(replace(config, **settings), "worker 2", node=NODE)
    other.load()
    assert other._study.offer is not None


def test_a_head_learns_by_its_own_name(config, tmp_path):
    path = save_llama(tmp_path / "target", seed=1)
    head = replace(config.target, path=str(path), head=save_head(tmp_path / "head", path, "dspark"), head_only=True)
    engine = replace(ENGINE, drafting="head_worker")
    settings = {"draft_learning": "on", "target": replace(head, head_only=False), "draft": head, "engine": engine}
    worker = DraftWorker(replace(config, **settings), "worker 1", node=NODE)
    worker.load()
    assert isinstance(worker._study._learner, HeadLearner)
    assert worker._study._draft == open_model(ModelConfig(head.head)).digest


@pytest.fixture(scope="module")
def two_drafts(config, tmp_path_factory) -> GroupConfig:
    """A draft that is unlike the target, and one that is the target."""
    unlike = save_llama(tmp_path_factory.mktemp("unlike") / "model", seed=2)
    draft = replace(config.draft, path=str(unlike), others=(config.target.path,))
    return replace(config, draft=draft, engine=replace(ENGINE, num_drafts=2, speculation="fixed"))


def serve_lease(config: GroupConfig, identity: str, connection) -> None:
    """Serve a lease in this process, until it is killed."""
    worker = DraftWorker(config, "worker 1", node=NODE)
    worker.load()
    connection.send(worker.lease(identity, 4))
    worker.serve()


async def test_two_drafts_are_served_and_chosen_from_and_killed_without_a_trace_in_the_texts(two_drafts):
    settings, context = two_drafts.engine, multiprocessing.get_context("spawn")
    verifier = assemble(open_model(two_drafts.target), None, settings).load_verifier()
    connector, drafter, failures = Connector(NODE_ID), RemoteDrafter(vocab_size=64, timeout_s=30.0), list[str]()

    async def texts(drafter: Drafter, **killed_after: BaseProcess) -> dict[str, list[int]]:
        engine = Engine(
            settings, verifier.backend.info, drafter=drafter, verifier=verifier, num_blocks=verifier.num_blocks
        )
        for seed in range(6):
            params = SamplingParams(temperature=0.7 * (seed % 2), seed=seed, max_tokens=40, ignore_eos=True)
            engine.add(str(seed), [5, 6 + seed, 7], params)
        found: dict[str, list[int]] = {str(seed): [] for seed in range(6)}
        for rounds in itertools.count():
            if not engine.has_work:
                break
            for output in await engine.step():
                found[output.request_id] += output.token_ids
            if rounds == 8 and killed_after:
                killed_after["process"].kill()
        counts.append(engine.planner.num_tokens_by_draft)
        return found

    counts = list[dict[tuple[int, str], int]]()
    expected = await texts(NoDrafter())
    mine, its = context.Pipe()
    process = context.Process(target=serve_lease, args=(two_drafts, connector.identity, its))
    process.start()
    lease = await asyncio.to_thread(mine.recv)
    link = connector.connect(lease.endpoint, version=lease.version, on_break=failures.append)
    try:
        drafter.connect(link, failures.append)
        assert await texts(drafter) == expected
        assert counts[-1][1, "accepted"] == counts[-1][1, "verified"] > 4 * counts[-1][0, "verified"] > 0
        assert await texts(drafter, process=process) == expected
        assert failures
        assert drafter.fallbacks["absent"] > 0
    finally:
        link.close()
        process.kill()
        process.join()
