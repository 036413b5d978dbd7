"""A group over workers that start, end and fail on demand; tests/e2e/groups has real processes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import group as group_module
from cluster import leases as leases_module
from cluster.config import GroupConfig
from cluster.group import SpeculationGroup
from cluster.leases import Lease
from cluster.memory_plan import MemoryPlan
from cluster.transport import Connector, Endpoint
from cluster.worker_set import WorkerDiedError
from engine.config import CompileProgress, EngineConfig, ModelConfig, ModelInfo
from engine.errors import TargetError
from engine.execution.memory import CacheSize
from engine.models.registry import open_model
from tests.cluster.fakes import FakeLink, answering, process_ids
from tests.waiting import wait_for

CONFIG = GroupConfig(ModelConfig("target"), ModelConfig("draft"), EngineConfig(num_blocks=39), start_timeout_s=5.0)
GROUPS: list[SpeculationGroup] = []


def sources(config):
    return open_model(config.target), None if config.draft is None else open_model(config.draft)


class Workers:
    """What `start_target` and `start_draft` return: two ranks, or a draft worker."""

    def __init__(self, pid: int, cache: CacheSize, on_break: Callable[[str], None] | None) -> None:
        self.cache = cache
        self.loaded = [SimpleNamespace(vocab_size=1000)] * 2
        self.info = SimpleNamespace(name=f"draft {pid}")
        self.actors = [SimpleNamespace(lease=SimpleNamespace(remote=self.lease))]
        self.processes = [SimpleNamespace(pid=pid), SimpleNamespace(pid=pid + 1)]
        self.links = [answering(lambda _: None, on_break=on_break) for _ in range(2)]
        self.is_killed = False
        self.compiling: list[CompileProgress] = []
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait_for_end(self, hang_timeout_s: float) -> str:
        assert hang_timeout_s == CONFIG.hang_timeout_s
        return await self._reason

    def end(self, reason: str) -> None:
        self._reason.set_result(reason)

    def kill(self) -> None:
        self.is_killed = True

    async def lease(self, identity: str, num_rows: int) -> Lease:
        assert num_rows == CONFIG.engine.max_num_seqs
        return Lease(str(self.processes[0].pid), 1, Endpoint("", "", "127.0.0.1", 9, identity), self.info)


@dataclass
class Starts:
    """Starts workers, and fails instead where `failures` says so; remembers what it was asked for."""

    first_pid: int
    failures: list[Exception] = field(default_factory=list)
    workers: list[Workers] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    hangs: bool = False
    may_load: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, _config: Any, _placement: Any, *arguments: Any) -> Workers:
        if len(arguments) == 1:
            version, on_break = 1, None
            cache = await arguments[0].plan_draft([])
        else:
            _connector, version, plan, on_break = arguments
            cache = plan.plan_target([], [])
        self.num_blocks.append(cache.num_blocks)
        self.versions.append(version)
        if self.hangs:
            await asyncio.Event().wait()
        await self.may_load.wait()
        if self.failures:
            raise self.failures.pop(0)
        pid = self.first_pid + 10 * len(self.workers)
        self.workers.append(Workers(pid, cache, on_break))
        return self.workers[-1]


def starts_at(name: str, first_pid: int, monkeypatch: pytest.MonkeyPatch) -> Starts:
    starts = Starts(first_pid)
    starts.may_load.set()
    monkeypatch.setattr(group_module, name, starts)
    return starts


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> Starts:
    return starts_at("start_target", 100, monkeypatch)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    return starts_at("start_draft", 500, monkeypatch)


@pytest.fixture(autouse=True)
def no_pause_and_no_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_FIRST_RETRY_S", 0.0)
    monkeypatch.setattr(leases_module, "_FIRST_RETRY_S", 0.0)

    def connect(self: Connector, endpoint: Endpoint, *, version: int, on_break: Callable[[str], None]) -> FakeLink:
        self.link = answering(lambda _: None, on_break=on_break)
        return self.link

    monkeypatch.setattr(Connector, "connect", connect)
    monkeypatch.setattr(group_module, "_LAST_WORDS_S", 0.01)
    monkeypatch.setattr(group_module, "shared_tokens", lambda *_: None)


@pytest.fixture(autouse=True)
async def stop_groups() -> AsyncIterator[None]:
    yield
    while GROUPS:
        await GROUPS.pop().stop()


async def started(config: GroupConfig = CONFIG) -> SpeculationGroup:
    group = SpeculationGroup(config, SimpleNamespace(), Connector("node 1"), *sources(config), owns_placement=False)
    GROUPS.append(group)
    await group._start_all()
    return group


async def refusal(waiting: Awaitable[None]) -> str:
    with pytest.raises(TargetError) as caught:
        await waiting
    return str(caught.value)


async def test_a_started_group_is_available_and_has_the_planned_blocks_and_block_0(targets, drafts):
    group = await started()
    assert group.is_available
    assert (group.num_blocks, group.num_states) == (40, 68)
    assert process_ids(group) == {"draft": 500, "target-0": 100, "target-1": 101}


async def test_ranks_that_are_killed_while_the_group_starts_are_started_again(targets, drafts, caplog):
    caplog.set_level(logging.WARNING, "cluster.group")
    targets.failures = [WorkerDiedError("killed") for _ in range(4)]
    group = await started()
    assert group.is_available
    await wait_for(lambda: group.remote_drafter.is_available)
    assert len(targets.versions) == 5
    assert len(drafts.versions) == 1  # it goes on loading
    assert len(caplog.messages) == 4
    assert "did not survive start 4 of 5" in caplog.messages[-1]


@pytest.mark.parametrize("victims", ["targets", "drafts"])
async def test_a_worker_that_fails_by_itself_fails_the_start(victims, targets, drafts, request, monkeypatch):
    monkeypatch.setattr(group_module, "_FIRST_RETRY_S", 1000.0)
    monkeypatch.setattr(leases_module, "_FIRST_RETRY_S", 1000.0)
    failing = request.getfixturevalue(victims)
    failing.failures = [TargetError("a worker failed to start: ValueError('a bug')")]
    assert "a bug" in await refusal(started())
    assert len(failing.versions) == 1


async def test_a_group_goes_live_while_its_draft_is_killed_again_and_again(targets, drafts, caplog):
    caplog.set_level(logging.WARNING, "cluster.leases")
    drafts.failures = [WorkerDiedError("killed") for _ in range(20)]
    group = await started()
    assert group.is_available
    assert group.draft_info is None
    assert "Draft worker did not start, next try in 0 s: killed" in caplog.messages
    await wait_for(lambda: group.remote_drafter.is_available)
    assert group.draft_info is drafts.workers[0].info
    assert len(targets.versions) == 1


async def test_a_group_goes_live_before_a_draft_that_starts_slowly_which_joins_later(
    targets, drafts, monkeypatch, caplog
):
    monkeypatch.setattr(leases_module, "_GRACE_S", 0.01)
    drafts.may_load.clear()
    group = await started()
    assert group.is_available
    assert not group.remote_drafter.is_available
    assert "decoding without drafts until it has" in caplog.text
    drafts.may_load.set()
    await wait_for(lambda: group.remote_drafter.is_available)
    drafts.workers[0].end("killed")
    await wait_for(lambda: len(drafts.workers) == 2)


async def test_a_draft_that_loads_as_long_as_its_target_is_waited_for(targets, drafts):
    targets.may_load.clear()
    drafts.may_load.clear()
    starting = asyncio.create_task(started())
    await wait_for(lambda: bool(targets.versions and drafts.versions))
    targets.may_load.set()
    await wait_for(lambda: bool(targets.workers))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not starting.done()
    drafts.may_load.set()
    group = await starting
    await wait_for(lambda: group.remote_drafter.is_available)


async def test_whichever_worker_starts_last_or_again_meets_the_other(targets, drafts, monkeypatch):
    met = []

    async def introduce(*workers: Any) -> None:
        met.append(workers[:2])

    monkeypatch.setattr(group_module, "introduce", introduce)
    group = await started(replace(CONFIG, engine=replace(CONFIG.engine, drafting="head_worker")))
    await wait_for(lambda: (targets.workers[0], drafts.workers[0]) in met)
    drafts.workers[0].end("killed")
    group._connector.link.break_connection("killed")
    await wait_for(lambda: len(drafts.workers) == 2 and met[-1] == (targets.workers[0], drafts.workers[1]))
    group.remote_verifier.disconnect("lost")
    await group.recover()
    await wait_for(lambda: met[-1] == (targets.workers[1], drafts.workers[1]))


async def test_a_recovery_replaces_all_ranks_when_one_is_lost(targets, drafts):
    group = await started()
    targets.workers[0].end("killed")
    await wait_for(lambda: not group.remote_verifier.is_available)
    assert not group.is_available
    assert len(targets.workers) == 1
    await group.recover()
    assert group.is_available
    assert targets.workers[0].is_killed
    assert targets.versions[1] > targets.versions[0]
    assert targets.num_blocks == [39, 39]  # the engine's block tables outlive the ranks
    assert process_ids(group)["target-0"] == 110


async def test_the_end_of_replaced_ranks_is_ignored(targets, drafts):
    group = await started()
    group.remote_verifier.disconnect("late")
    await group.recover()
    targets.workers[0].end("killed")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert group.is_available


async def test_two_recoveries_at_once_start_the_ranks_once(targets, drafts):
    group = await started()
    group.remote_verifier.disconnect("lost")
    await asyncio.gather(group.recover(), group.recover())
    assert len(targets.workers) == 2


async def test_a_recovery_ends_when_the_group_is_stopped(targets, drafts):
    group = await started()
    group.remote_verifier.disconnect("lost")
    targets.hangs = True
    recovering = asyncio.create_task(group.recover())
    await wait_for(lambda: len(targets.num_blocks) == 2)
    await group.stop()
    assert await refusal(recovering) == "the group was stopped"


async def test_a_lost_draft_worker_is_started_again_until_it_comes_back(targets, drafts):
    group = await started()
    drafts.failures = [TargetError("no room"), TargetError("no room")]
    drafts.workers[0].end("killed")
    await wait_for(lambda: len(drafts.workers) == 2)
    await wait_for(lambda: group.remote_drafter.is_available)
    assert len(drafts.num_blocks) == 4
    assert drafts.workers[0].is_killed
    assert process_ids(group)["draft"] == 510
    assert group.is_available


async def test_models_that_compile_at_once_are_told_as_one(targets, drafts):
    group = await started()
    assert group.compiling is None
    targets.workers[0].compiling, drafts.workers[0].compiling = (
        [CompileProgress(1, 3, 40.0)],
        [CompileProgress(0, 3, 25.0)],
    )
    assert group.compiling == CompileProgress(1, 6, 40.0)
    await group.stop()
    assert group.compiling is None


async def test_a_draft_that_waits_for_the_memory_plan_ends_with_the_group(targets, monkeypatch):
    has_joined = asyncio.Event()

    async def start_draft(_config: Any, _placement: Any, plan: MemoryPlan) -> None:
        has_joined.set()
        try:
            await plan.plan_draft([])
        finally:
            has_joined.clear()

    async def start_target(*_: Any) -> None:
        await has_joined.wait()
        raise TargetError("it died during its survey")

    monkeypatch.setattr(group_module, "start_draft", start_draft)
    monkeypatch.setattr(group_module, "start_target", start_target)
    config = replace(CONFIG, engine=EngineConfig())
    group = SpeculationGroup(config, SimpleNamespace(), Connector("node 1"), *sources(config), owns_placement=False)
    assert "died during its survey" in await refusal(group._start_all())
    await group.stop()
    assert not has_joined.is_set()


async def test_the_draft_or_the_first_rank_of_the_target_is_killed_if_there_is_one(targets, drafts):
    group = await started()
    await wait_for(lambda: group.remote_drafter.is_available)
    killed = []
    for name, workers in (("draft", drafts.workers[0]), ("target", targets.workers[0])):
        workers.actors[0].kill = SimpleNamespace(remote=lambda name=name: killed.append(name))
    assert await group.kill("target")
    assert await group.kill("draft")
    assert killed == ["target", "draft"]
    await group.stop()
    assert not await group.kill("draft")


class OneLease:
    """The leases of one worker, which no one can reach."""

    def __init__(self) -> None:
        self.identities: list[str] = []
        self.killed: list[Lease] = []

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        self.identities.append(identity)
        assert num_rows == CONFIG.engine.max_num_seqs
        return Lease("worker 1", 1, Endpoint("", "", "127.0.0.1", 9, Connector("").identity), INFO)

    async def kill(self, lease: Lease) -> bool:
        self.killed.append(lease)
        return True


INFO = ModelInfo("draft", 1000, 100, [], 1, "float32", "cpu")


async def test_a_group_with_a_draft_pool_leases_its_draft_worker_and_starts_none(targets, drafts):
    leases = OneLease()
    config = replace(CONFIG, draft_pool=True)
    connector = Connector("node 1")
    placement = SimpleNamespace()
    group = SpeculationGroup(config, placement, connector, *sources(config), owns_placement=False, leases=leases)
    GROUPS.append(group)
    await group._start_all()
    await wait_for(lambda: group.remote_drafter.is_available)
    assert leases.identities == [connector.identity]
    assert await group.kill("draft")
    assert [lease.worker for lease in leases.killed] == ["worker 1"]
    assert group.draft_info is INFO
    assert drafts.workers == []
    await group.stop()
    assert not group.remote_drafter.is_available


async def test_the_start_fails_when_the_ranks_are_killed_again_and_again(targets, drafts):
    targets.failures = [WorkerDiedError("killed") for _ in range(9)]
    assert await refusal(started()) == "killed"
    assert len(targets.versions) == 5


async def test_a_recovery_has_a_deadline(targets, drafts):
    group = await started()
    group.config = GroupConfig(ModelConfig("target"), start_timeout_s=0.0)
    group.remote_verifier.disconnect("lost")
    targets.hangs = True
    assert "did not restart within 0 s" in await refusal(group.recover())
