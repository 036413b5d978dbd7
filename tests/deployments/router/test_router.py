"""Router: the shell around a round loop, as Serve calls it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.transport import Inbox
from deployments.autoscaling import IS_RECOVERING, NUM_REQUESTS
from deployments.router import waiting
from deployments.router.delivery import Deliveries, decode
from deployments.router.drain_rate import LONGEST_RETRY_S
from deployments.router.generation import Description, ModelLimits, QueueReport, WithdrawnError
from deployments.router.load import Load
from deployments.router.router import Router
from deployments.router.state import RouterState
from engine.config import ModelInfo
from engine.errors import QueueFullError, RequestError, TargetError
from engine.sequence import RequestOutput
from tests.deployments.fakes import EOS_TOKEN_IDS, MAX_MODEL_LEN, VOCAB_SIZE, Rig, generation

INFO = ModelInfo("tiny", VOCAB_SIZE, MAX_MODEL_LEN, EOS_TOKEN_IDS, 1000, "float32", "cpu")


class Group:
    """A speculation group without workers; it may have lost its target."""

    is_available = True
    draft_info: ModelInfo | None = None

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
        self.loads: list[Load] = []
        self.inbox: Inbox

    def deliver(self, payload: bytes) -> None:
        content = decode(payload)
        if isinstance(content, Load):
            self.loads.append(content)
        else:
            self.outputs.append(content)

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
    router._deliveries, router._id, router._replica = Deliveries(), "a", "r1"
    router._description = Description(INFO, None, ModelLimits(VOCAB_SIZE, MAX_MODEL_LEN, 4), 9, target_id="/models/a")
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
    answers = [answer async for answer in router.generate(generation(logit_bias={999: 1.0}), mail.inbox.address)]
    assert isinstance(answers[0].error, RequestError)
    assert len(answers) == 1
    assert not mail.outputs


async def test_a_full_queue_says_when_it_will_have_drained(rig: Rig, router: Any, mail: Mail) -> None:
    rig.verifier.gate.clear()
    calls = [router.generate(generation(n=8, max_tokens=400), mail.inbox.address) for _ in range(10)]
    tasks = [asyncio.create_task(anext(call)) for call in calls]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    failure = done.pop().result()
    error = failure.error
    assert isinstance(error, QueueFullError)
    assert failure.refused_by == "a"
    assert error.retry_after_s == LONGEST_RETRY_S, "64 requests, and nothing was measured"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    rig.verifier.gate.set()


async def test_a_request_over_its_deadline_is_a_failure_after_its_tokens(router: Any, rig: Rig, mail: Mail) -> None:
    call = router.generate(generation(max_tokens=400, timeout_s=0.05), mail.inbox.address)
    answers = [answer async for answer in call]
    assert isinstance(answers[-1].error, TimeoutError)
    assert len(await mail.until(answers[0])) == answers[0]


async def test_an_ingress_hears_of_the_queue(
    router: Any, rig: Rig, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.router.router.REPORT_INTERVAL_S", 0.001)
    reporting = asyncio.create_task(router._report_load())
    call = asyncio.create_task(anext(router.generate(generation(n=3, max_tokens=400), mail.inbox.address)))
    async with asyncio.timeout(10):
        while not any((load.router, load.num_requests, load.num_yours) == ("a", 3, 3) for load in mail.loads):
            await asyncio.sleep(0.001)
        call.cancel()
        while mail.loads[-1].num_requests or mail.loads[-1].num_yours:
            await asyncio.sleep(0.001)
    reporting.cancel()


async def test_a_request_for_another_target_is_refused(router: Any, mail: Mail) -> None:
    for request in (generation(), replace(generation(), target_id="/models/a")):
        assert [number async for number in router.generate(request, mail.inbox.address)] == [8]
    other = replace(generation(), target_id="/models/b")
    [failure] = [answer async for answer in router.generate(other, mail.inbox.address)]
    assert isinstance(failure.error, TargetError)
    assert (str(failure.error).partition(",")[0], failure.refused_by) == ("this Router serves /models/a", "a")


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


async def test_requests_that_wait_are_withdrawn_from_the_replica_that_is_meant(
    router: Any, rig: Rig, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SHORTEST_WAIT_S", 0.0)
    rig.verifier.gate.clear()
    me = mail.inbox.address
    running = asyncio.create_task(anext(router.generate(generation(n=8), me)))
    while rig.engine.num_running < 8:
        await asyncio.sleep(0)
    call = router.generate(replace(generation(n=3), request_id="waiting"), me)
    ending = asyncio.create_task(anext(call))
    while rig.engine.num_waiting < 3:
        await asyncio.sleep(0)
    assert await router.report_queue(me) == QueueReport("a", 11, 3, 3, True)
    assert await router.report_queue(me._replace(port=1)) == QueueReport("a", 11, 3, 0, True)
    assert await router.withdraw("b", me, 9) == 0
    assert await router.withdraw("a", me._replace(port=1), 9) == 0
    assert await router.withdraw("a", me, 9) == 3
    assert isinstance((await ending).error, WithdrawnError)
    assert [item async for item in call] == []
    rig.verifier.gate.set()
    assert await running == 64


async def test_a_replica_that_was_stopped_says_which_requests_may_leave_it(
    router: Any, rig: Rig, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SHORTEST_WAIT_S", 0.0)
    monkeypatch.setattr("deployments.router.router.REPORT_INTERVAL_S", 0.001)
    rig.verifier.gate.clear()
    requests = [
        replace(generation(n=8), request_id="running"),
        *(replace(generation(), request_id=key) for key in "bc"),
    ]
    calls = [asyncio.create_task(anext(router.generate(request, mail.inbox.address))) for request in requests]
    reporting = asyncio.create_task(router._report_load())
    async with asyncio.timeout(10):
        while not mail.loads or mail.loads[-1].num_requests < 10:
            await asyncio.sleep(0.001)
        assert mail.loads[-1].leaving == ()
        monkeypatch.setattr("deployments.router.router.stopped_replica", object)
        while not mail.loads[-1].leaving:
            await asyncio.sleep(0.001)
    assert mail.loads[-1].leaving == ("c", "b")
    reporting.cancel()
    rig.verifier.gate.set()
    assert await asyncio.gather(*calls) == [64, 8, 8]


async def test_the_draft_is_described_as_soon_as_it_has_joined(router: Any) -> None:
    assert (await router.describe()).draft is None
    router._group.draft_info = INFO
    assert (await router.describe()).draft == INFO


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


async def test_an_ingress_is_told_whether_the_target_can_take_rounds(router: Any, rig: Rig) -> None:
    assert await router.state() == RouterState("r1", None)
    router._group.is_available = False
    assert await router.state() == RouterState("r1", "the target is being restarted")
    await rig.loop.stop()
    assert await router.state() == RouterState("r1", "the round loop has ended")


async def test_metrics_say_whose_they_are(router: Any) -> None:
    assert (await router.collect()).replica == "r1"
