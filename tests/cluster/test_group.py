"""How a group connects its workers to the engine's two roles, without Ray; `tests/e2e/test_group.py` has the rest."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from cluster import group as group_module
from cluster.config import GroupConfig
from cluster.group import SpeculationGroup
from cluster.transport import Connector
from cluster.workers.actors import Loaded
from cluster.workers.responder import TargetResponder
from engine.config import EngineConfig, ModelConfig, ModelInfo
from engine.errors import TargetError
from tests.cluster.fakes import FakeLink, SumVerifier, verify_row

INFO = ModelInfo(*[1] * len(ModelInfo.__dataclass_fields__))


@dataclass
class FakeWorkers:
    """Two ranks that have loaded; `end` ends one of them."""

    links: list[FakeLink]
    loaded: list[Loaded] = field(default_factory=lambda: [Loaded(replace(INFO, vocab_size=1000), 30)] * 2)
    end: "asyncio.Future[str]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_killed: bool = False

    async def wait_for_end(self) -> str:
        return await self.end

    def kill(self) -> None:
        self.is_killed = True


@pytest.fixture
async def started(monkeypatch):
    """A group with a target of two ranks; `starts` holds what was started and with how many blocks, the newest last."""
    starts = []

    async def start_target(config, placement, connector, version, plan, on_break):
        links = [
            FakeLink(
                TargetResponder(SumVerifier(), rank=rank, capacity=4, version=version).answer,
                version=version,
                on_break=on_break,
            )
            for rank in range(2)
        ]
        starts.append((FakeWorkers(links), await plan.join("target")))
        return starts[-1][0]

    monkeypatch.setattr(group_module, "start_target", start_target)
    config = GroupConfig(ModelConfig("target"), engine=EngineConfig(num_blocks=100), tensor_parallel_size=2)
    group = SpeculationGroup(config, None, Connector("node 1"), owns_placement=False)
    await group._start_all()
    yield group, starts
    await group.stop()


async def verify(group) -> list[int]:
    [verdict] = await group.verifier.verify([verify_row("a", [1, 2])])
    return verdict.token_ids


async def test_a_started_group_verifies_with_the_blocks_of_its_ranks(started):
    group, _ = started
    assert group.num_blocks == 30
    assert await verify(group) == [3]


async def test_a_broken_connection_to_any_rank_ends_the_rounds_until_all_ranks_are_restarted(started):
    """The ranks above 0 do not answer, so nothing but the break shows that they have missed a request."""
    group, starts = started
    starts[0][0].links[1].break_connection("reset by peer")
    with pytest.raises(TargetError, match="reset by peer"):
        await verify(group)
    with pytest.raises(TargetError, match="not running"):
        await group.check_health()
    await group.recover()
    assert await verify(group) == [3]
    assert starts[0][0].is_killed


async def test_restarted_ranks_have_the_blocks_of_the_first_ones(started):
    """The engine's block tables outlive the ranks."""
    group, starts = started
    starts[0][0].links[0].break_connection("reset by peer")
    await group.recover()
    assert [num_blocks for _, num_blocks in starts] == [100, 100]


async def test_the_end_of_a_rank_ends_the_rounds(started):
    group, starts = started
    starts[0][0].end.set_result("process 9 died")
    async with asyncio.timeout(10):
        while group.verifier.is_available:
            await asyncio.sleep(0)
    with pytest.raises(TargetError, match="a target rank was lost: process 9 died"):
        await verify(group)


async def test_recovery_leaves_a_running_target_alone(started):
    group, starts = started
    await group.recover()
    assert len(starts) == 1
    assert not starts[0][0].is_killed


async def test_stopping_kills_the_workers_once(started):
    group, starts = started
    await group.stop()
    await group.stop()
    assert starts[0][0].is_killed
    with pytest.raises(TargetError, match="the group was stopped"):
        await verify(group)
