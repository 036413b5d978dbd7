"""Router: the shell around a round loop, as Serve calls it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.autoscaling import IS_RECOVERING, NUM_REQUESTS
from deployments.router.router import Router
from engine.errors import TargetError
from tests.deployments.fakes import Rig, generation


class Group:
    """A speculation group without workers; it may have lost its target."""

    error: TargetError | None = None

    @property
    def is_available(self) -> bool:
        return self.error is None

    async def check_health(self) -> None:
        if self.error is not None:
            raise self.error

    async def stop(self) -> None:
        pass


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.loop.stop()


@pytest.fixture
def router(rig: Rig) -> Any:
    router: Any = object.__new__(Router)
    router._engine, router._loop, router._metrics, router._group = rig.engine, rig.loop, rig.metrics, Group()
    return router


async def test_closing_the_generator_frees_the_blocks_at_once(router: Any, rig: Rig) -> None:
    rounds = await router.generate(generation(max_tokens=400))
    await anext(rounds)
    assert rig.engine.num_free_blocks < rig.engine.num_blocks
    # As Serve ends the generator of a caller that has gone.
    with pytest.raises(asyncio.CancelledError):
        await rounds.athrow(asyncio.CancelledError())
    assert rig.engine.num_free_blocks == rig.engine.num_blocks
    assert router.record_autoscaling_stats() == {NUM_REQUESTS: 0, IS_RECOVERING: 0}


async def test_cancelling_a_caller_that_waits_for_tokens_frees_the_blocks(router: Any, rig: Rig) -> None:
    rig.verifier.gate.clear()

    async def consume() -> None:
        async for _ in await router.generate(generation(max_tokens=400)):
            pass

    task = asyncio.create_task(consume())
    while not rig.engine.num_running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.engine.num_free_blocks == rig.engine.num_blocks
    rig.verifier.gate.set()


async def test_the_autoscaler_is_told_of_all_sequences(router: Any, rig: Rig) -> None:
    rounds = await router.generate(generation(n=2, num_prompts=6, max_tokens=400))
    await anext(rounds)
    assert router.record_autoscaling_stats() == {NUM_REQUESTS: 12, IS_RECOVERING: 0}
    await rounds.aclose()


async def test_the_autoscaler_is_told_that_the_target_is_down(router: Any) -> None:
    router._group.error = TargetError("gone")
    assert router.record_autoscaling_stats() == {NUM_REQUESTS: 0, IS_RECOVERING: 1}


async def test_a_health_check_has_a_lost_target_restarted(router: Any, rig: Rig) -> None:
    await router.check_health()
    assert rig.group.num_recoveries == 0
    router._group.error = TargetError("gone")
    await router.check_health()
    while not rig.group.num_recoveries:
        await asyncio.sleep(0)
