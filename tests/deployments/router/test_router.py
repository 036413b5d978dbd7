"""Router: the shell around a round loop, as Serve calls it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from cluster.transport import Inbox
from deployments.autoscaling import IS_RECOVERING, NUM_REQUESTS
from deployments.router.delivery import Deliveries, decode_output
from deployments.router.router import Router
from engine.errors import RequestError, TargetError
from engine.sequence import RequestOutput
from tests.deployments.fakes import Rig, generation


class Group:
    """A speculation group without workers; it may have lost its target."""

    is_available = True

    async def stop(self) -> None:
        pass


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.loop.stop()


class Mail:
    """An Ingress's inbox and the outputs that have come."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.inbox: Inbox

    def deliver(self, payload: bytes) -> None:
        self.outputs.append(decode_output(payload))

    async def until(self, count: int) -> list[RequestOutput]:
        async with asyncio.timeout(10):
            while len(self.outputs) < count:
                await asyncio.sleep(0.001)
        return self.outputs


@pytest.fixture
async def mail() -> AsyncIterator[Mail]:
    mail = Mail()
    mail.inbox = await Inbox.open("127.0.0.1", mail.deliver)
    yield mail
    mail.inbox.close()


@pytest.fixture
def router(rig: Rig) -> Iterator[Any]:
    router: Any = object.__new__(Router)
    router._engine, router._loop, router._metrics, router._group = rig.engine, rig.loop, rig.metrics, Group()
    router._deliveries = Deliveries()
    yield router
    router._deliveries.close()


async def test_tokens_go_to_the_inbox_and_their_number_to_the_caller(router: Any, mail: Mail) -> None:
    sent = [number async for number in router.generate(generation(n=2), mail.inbox.address)]
    outputs = await mail.until(sum(sent))
    assert sent == [16]
    assert {output.request_id: output.finish_reason for output in outputs} == dict.fromkeys(
        ("request-0", "request-1"), "length"
    )


async def test_an_error_after_tokens_follows_their_number(router: Any, rig: Rig, mail: Mail) -> None:
    call = router.generate(generation(max_tokens=400), mail.inbox.address)
    ending = asyncio.create_task(anext(call))
    await mail.until(2)
    await rig.loop.stop()
    num_sent = await ending
    assert len(await mail.until(num_sent)) == num_sent
    with pytest.raises(TargetError, match="shutting down"):
        await anext(call)


async def test_a_refusal_is_the_first_answer(router: Any, mail: Mail) -> None:
    with pytest.raises(RequestError):
        await anext(router.generate(generation(logit_bias={999: 1.0}), mail.inbox.address))
    assert not mail.outputs


async def test_an_ingress_that_cannot_be_reached_ends_the_request(router: Any, rig: Rig, mail: Mail) -> None:
    mail.inbox.close()
    with pytest.raises(TargetError, match="the Ingress cannot be reached"):
        await anext(router.generate(generation(max_tokens=400), mail.inbox.address))
    assert rig.engine.num_free_blocks == rig.engine.num_blocks


async def test_cancelling_the_call_frees_the_blocks_at_once(router: Any, rig: Rig, mail: Mail) -> None:
    call = asyncio.create_task(anext(router.generate(generation(max_tokens=400), mail.inbox.address)))
    await mail.until(1)
    assert rig.engine.num_free_blocks < rig.engine.num_blocks
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert rig.engine.num_free_blocks == rig.engine.num_blocks
    assert router.record_autoscaling_stats() == {NUM_REQUESTS: 0, IS_RECOVERING: 0}


async def test_cancelling_a_call_that_waits_for_tokens_frees_the_blocks(router: Any, rig: Rig, mail: Mail) -> None:
    rig.verifier.gate.clear()

    async def consume() -> None:
        async for _ in router.generate(generation(max_tokens=400), mail.inbox.address):
            pass

    task = asyncio.create_task(consume())
    while not rig.engine.num_running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.engine.num_free_blocks == rig.engine.num_blocks
    rig.verifier.gate.set()


async def test_the_autoscaler_is_told_of_all_sequences(router: Any, mail: Mail) -> None:
    call = asyncio.create_task(
        anext(router.generate(generation(n=2, num_prompts=6, max_tokens=400), mail.inbox.address))
    )
    await mail.until(12)
    assert router.record_autoscaling_stats() == {NUM_REQUESTS: 12, IS_RECOVERING: 0}
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_the_autoscaler_is_told_that_the_target_is_down(router: Any) -> None:
    router._group.is_available = False
    assert router.record_autoscaling_stats() == {NUM_REQUESTS: 0, IS_RECOVERING: 1}


async def test_a_health_check_has_a_lost_target_restarted(router: Any, rig: Rig) -> None:
    await router.check_health()
    assert rig.group.num_recoveries == 0
    router._group.is_available = False
    await router.check_health()
    while not rig.group.num_recoveries:
        await asyncio.sleep(0)
