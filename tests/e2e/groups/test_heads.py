"""A head on the draft worker of a real group: its drafts come back after the death of either worker."""

import asyncio
from dataclasses import replace

import pytest

from cluster.group import SpeculationGroup
from engine.errors import TargetError
from tests.e2e.groups.generation import Generation, generate, running
from tests.engine.heads.saved_heads import save_head
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

SOON_S = 10


async def run_until_tokens(generation: Generation, count: int) -> None:
    await generation.run(until=lambda: generation.num_tokens > count)


async def drafts_come(generation: Generation) -> bool:
    """Whether drafts are verified before the texts end: on a busy machine rounds without any may be over sooner."""
    before = generation.engine.stats.num_drafts
    await generation.run(until=lambda: generation.engine.stats.num_drafts > before + 3)
    return generation.engine.stats.num_drafts > before + 3


async def assert_drafts_soon(generation: Generation, group: SpeculationGroup) -> None:
    async with asyncio.timeout(SOON_S):
        while not await drafts_come(generation):
            generation = generate(group)


async def test_a_head_drafts_again_after_its_worker_or_the_target_was_killed(config, expected, tmp_path):
    target = replace(config.target, head=save_head(tmp_path / "head", config.target.path))
    engine = replace(config.engine, drafting="head_worker", speculation="fixed")
    config = replace(
        config, target=target, draft=replace(target, head_only=True, execution="torch"), engine=engine, run_ahead="off"
    )
    async with running(config) as group:
        generation = generate(group)
        await run_until_tokens(generation, 60)
        assert await group.kill("draft")
        await wait_for(lambda: not group.remote_drafter.is_available)
        await run_until_tokens(generation, 80)
        await wait_for(lambda: group.remote_drafter.is_available)
        await assert_drafts_soon(generation, group)
        await generation.run()
        assert generation.text == expected
        generation = generate(group)
        await run_until_tokens(generation, 60)
        assert await group.kill("target")
        with pytest.raises(TargetError):
            await generation.run()
        generation.engine.reset()
        await group.recover()
        await assert_drafts_soon(generation, group)
        await generation.run()
        assert generation.text == expected
        assert group.remote_drafter.features["bytes"] > 0
