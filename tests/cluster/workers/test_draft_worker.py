"""A draft worker over real sockets: its leases, who may use them, and when they end."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.config import GroupConfig
from cluster.leases import Lease
from cluster.protocol.messages import Ping, Pong, PrefixDelta, Propose, ProposeEntry
from cluster.transport import Connector, Link, TransportError
from cluster.workers import draft_worker
from cluster.workers.draft_worker import DraftWorker
from engine.config import EngineConfig, ModelConfig
from engine.errors import TargetError
from engine.params import SamplingParams
from tests.cluster.wire import NODE_ID, in_thread
from tests.models import save_llama
from tests.waiting import wait_for

NODE = "127.0.0.1", NODE_ID
ENGINE = EngineConfig(num_speculative_tokens=3, max_num_seqs=4, block_size=4, num_blocks=600)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> GroupConfig:
    path = save_llama(tmp_path_factory.mktemp("models") / "model", seed=1)
    model = ModelConfig(str(path), dtype="float32", device="cpu", num_threads=1)
    return GroupConfig(model, model, ENGINE, draft_pool=True, run_ahead="off", hang_timeout_s=0.2)


@contextlib.contextmanager
def serving(config: GroupConfig) -> Iterator[DraftWorker]:
    worker = DraftWorker(config, "worker 1", max_groups=4, node=NODE)
    worker.load()
    with in_thread(worker):
        yield worker


@pytest.fixture
def worker(config: GroupConfig) -> Iterator[DraftWorker]:
    with serving(config) as worker:
        yield worker


def connect(lease: Lease, connector: Connector, breaks: list[str] | None = None) -> Link:
    return connector.connect(
        lease.endpoint, version=lease.version, on_break=[].append if breaks is None else breaks.append
    )


def propose(lease: Lease, number: int = 1, tokens=(5, 6, 7)) -> Propose:
    entry = ProposeEntry(PrefixDelta("a", 0, list(tokens), 3, SamplingParams(temperature=0)), 3)
    return Propose(number, lease.version, 30.0, [], [entry])


def ping(lease: Lease, number: int = 9) -> Ping:
    return Ping(number, lease.version, 30.0, [])


async def test_several_clients_get_their_drafts_each_by_its_own_lease(worker):
    leases, links = [], []
    for _ in range(3):
        connector = Connector(NODE_ID)
        leases.append(worker.lease(connector.identity, 4))
        links.append(connect(leases[-1], connector))
    assert len({lease.version for lease in leases}) == worker.num_leases == 3
    assert leases[0].worker == "worker 1"
    assert leases[0].info.vocab_size == 64
    drafts = [(await link.call(propose(lease))).drafts for lease, link in zip(leases, links, strict=True)]
    assert drafts[0] == drafts[1] == drafts[2]
    assert len(drafts[0][0].token_ids) == 3
    assert worker.num_proposals == 3
    assert 1 <= worker.num_passes <= 3
    for link in links:
        link.close()


async def test_a_lease_is_for_one_client_from_this_node_or_another(worker):
    connector, stranger = Connector("another node"), Connector("another node")
    lease = worker.lease(connector.identity, 4)
    with pytest.raises(TransportError):
        await connect(lease, stranger).call(replace_deadline(ping(lease), 0.5))
    assert isinstance(await connect(lease, connector).call(ping(lease)), Pong)


def replace_deadline(request: Ping, deadline_s: float) -> Ping:
    return Ping(request.round, request.version, deadline_s, [])


async def test_a_lease_ends_when_its_router_is_silent_and_leaves_its_room_to_others(worker, monkeypatch):
    monkeypatch.setattr(draft_worker, "LEASE_S", 0.3)
    connectors = [Connector(NODE_ID), Connector(NODE_ID)]
    silent, lively = (worker.lease(connector.identity, 4) for connector in connectors)
    breaks: list[str] = []
    links = [connect(silent, connectors[0], breaks), connect(lively, connectors[1])]
    await links[0].call(propose(silent))
    number = 0

    async def is_alone() -> bool:
        nonlocal number
        number += 1
        await links[1].call(ping(lively, number))
        return worker.num_leases == 1

    while not (await is_alone() and breaks):  # a worker without messages ends no lease
        pass
    assert not worker._queue.cache.prefixes
    assert (await links[1].call(propose(lively, 10**6))).drafts[0].token_ids
    for link in links:
        link.close()


async def test_the_latest_lease_can_be_ended_and_its_router_learns_of_it_at_once(worker):
    breaks: dict[int, list[str]] = {0: [], 1: []}
    links = []
    for number in range(2):
        connector = Connector(NODE_ID)
        lease = worker.lease(connector.identity, 4)
        links.append(connect(lease, connector, breaks[number]))
        await links[-1].call(ping(lease))
    worker.end_one()
    assert worker.num_leases == 1
    await wait_for(lambda: breaks[1])
    assert not breaks[0]
    worker.end_one()
    worker.end_one()
    await wait_for(lambda: breaks[0])
    for link in links:
        link.close()


def test_a_lease_that_does_not_fit_is_refused_with_the_numbers(worker):
    """A context of 512 + 3 tokens takes 129 blocks, and each of 4 rows one more."""
    for _ in range(4):
        worker.lease(Connector(NODE_ID).identity, 4)
    with pytest.raises(TargetError, match="worker 1 has 600 KV blocks; 4 leases and one of 4 rows need 665"):
        worker.lease(Connector(NODE_ID).identity, 4)
    worker.end_one()
    worker.lease(Connector(NODE_ID).identity, 4)


def test_a_client_goes_on_with_its_lease_until_that_ends_and_the_first_one_always_fits(worker):
    identity = Connector(NODE_ID).identity
    lease = worker.lease(identity, 10**6)
    assert worker.lease(identity, 4) is lease
    with pytest.raises(TargetError, match="1 leases and one of 4 rows"):
        worker.lease(Connector(NODE_ID).identity, 4)
    worker.end_one()
    assert worker.lease(identity, 4).version == lease.version + 1
    assert worker.num_leases == 1


async def test_a_pass_that_hangs_is_noticed(worker, monkeypatch):
    worker.check()
    connector, may_go_on = Connector(NODE_ID), threading.Event()
    lease = worker.lease(connector.identity, 4)
    link = connect(lease, connector)
    run = worker._backend.run
    monkeypatch.setattr(worker._backend, "run", lambda *arguments: (may_go_on.wait(30), run(*arguments))[1])
    call = await link.begin(propose(lease))
    await wait_for(lambda: is_hanging(worker))
    with pytest.raises(TargetError, match=r"draft worker worker 1 computes for longer than 0.2 s"):
        worker.check()
    may_go_on.set()
    assert (await call).drafts
    await wait_for(lambda: not is_hanging(worker))
    link.close()


def is_hanging(worker: DraftWorker) -> bool:
    with contextlib.suppress(TargetError):
        worker.check()
        return False
    return True


def test_the_cache_takes_what_four_groups_can_use(config):
    worker = DraftWorker(replace(config, engine=replace(ENGINE, num_blocks=None)), "1", max_groups=4, node=NODE)
    worker.load()
    assert worker._engine.num_blocks == 129 * 4 * 4
    short = DraftWorker(replace(config, engine=replace(ENGINE, max_model_len=61)), "1", max_groups=4, node=NODE)
    short.load()
    for _ in range(600 // (16 + 4)):
        short.lease(Connector(NODE_ID).identity, 4)
