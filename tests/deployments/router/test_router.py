"""Router: the shell around a round loop, as Serve calls it."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from cluster.transport import InboxAddress
from deployments.router.router import Router
from deployments.wire import (
    IS_RECOVERING,
    LONGEST_RETRY_S,
    NUM_REQUESTS,
    Description,
    Generation,
    ModelLimits,
    Outputs,
    Report,
)
from engine.config import CompileProgress, ModelInfo
from engine.errors import QueueFullError, TargetError
from tests.deployments.fakes import EOS_TOKEN_IDS, MAX_MODEL_LEN, VOCAB_SIZE, Rig, generation
from tests.deployments.router.conftest import Mail
from tests.waiting import wait_for

INFO = ModelInfo("tiny", VOCAB_SIZE, MAX_MODEL_LEN, EOS_TOKEN_IDS, 1000, "float32", "cpu")


class Group:
    """A speculation group without workers; it may have lost its target."""

    is_available = True
    draft_info: ModelInfo | None = None
    compiling: CompileProgress | None = None

    async def stop(self) -> None:
        pass


@pytest.fixture
def router(rig: Rig) -> Iterator[Any]:
    router: Any = object.__new__(Router)
    router._engine, router._loop, router._metrics, router._group = rig.engine, rig.loop, rig.metrics, Group()
    router._deliveries, router._prefixes, router._id, router._leases = {}, set(), "a", None
    router._description = Description(INFO, None, ModelLimits(VOCAB_SIZE, MAX_MODEL_LEN, 4), 9, target_id="/models/a")
    yield router
    router._disconnect()


def call(router: Any, request: Generation, mail: Mail) -> asyncio.Task[None]:
    """Serve's call, which yields once at the end."""

    async def consume() -> None:
        assert len([item async for item in router.generate(request, mail.address)]) == 1

    return asyncio.create_task(consume())


async def test_tokens_go_to_the_inbox_while_the_call_lasts(router: Any, mail: Mail) -> None:
    await call(router, generation(n=2), mail)
    assert {output.request_id: output.finish_reason for output in await mail.outputs(16)} == dict.fromkeys(
        ("request-0", "request-1"), "length"
    )
    assert all(isinstance(message, Outputs) for message in mail.messages)


async def test_an_error_comes_after_the_tokens_before_it(router: Any, rig: Rig, mail: Mail) -> None:
    request = call(router, generation(max_tokens=400), mail)
    await mail.outputs(2)
    await rig.loop.stop()
    error, refused_by = await mail.end()
    assert (type(error), str(error), refused_by) == (TargetError, "the replica is shutting down", None)
    await request


async def test_a_full_queue_refuses_and_says_when_it_will_have_drained(rig: Rig, router: Any, mail: Mail) -> None:
    rig.verifier.gate.clear()
    requests = [replace(generation(n=8, max_tokens=400), request_id=str(number)) for number in range(10)]
    tasks = [call(router, request, mail) for request in requests]
    error, refused_by = await mail.end()
    assert isinstance(error, QueueFullError)
    assert refused_by == "a"
    assert error.retry_after_s == LONGEST_RETRY_S, "64 requests, and nothing was measured"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    rig.verifier.gate.set()


async def test_a_bug_is_raised_by_the_call(router: Any, rig: Rig, mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.engine, "add", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await call(router, generation(), mail)


async def test_an_ingress_that_subscribes_gets_reports(
    router: Any, rig: Rig, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.router.router.REPORT_INTERVAL_S", 0.001)
    reporting = asyncio.create_task(router._keep_reporting())
    await router.subscribe(mail.address)

    def report(problem: str | None = None, **counts: Any) -> Report:
        return Report("a", problem, target_id="/models/a", **counts)

    async def until(expected: Report) -> None:
        await wait_for(lambda: mail.reports and structs.replace(mail.reports[-1], drain_rate=1.0) == expected)

    await until(report(num_ingresses=0))
    rig.verifier.gate.clear()
    requests = [replace(generation(n=n), request_id=key) for key, n in (("running", 8), ("b", 1), ("c", 2))]
    tasks = [call(router, request, mail) for request in requests]
    await until(report(num_requests=11, num_yours=11, movable=("c", "b")))
    router._group.is_available, router._group.compiling = False, CompileProgress(1, 6, 90.0)
    tasks.pop().cancel()
    restarting = {"num_requests": 9, "num_yours": 9, "movable": ("b",), "compiling": CompileProgress(1, 6, 90.0)}
    await until(report("the target is being restarted", **restarting))
    assert await router.compiling() == CompileProgress(1, 6, 90.0)
    router._group.compiling = None
    rig.verifier.gate.set()
    await asyncio.gather(*tasks)
    await rig.loop.stop()
    await until(report("the round loop has ended"))
    reporting.cancel()


async def reported(router: Any, mail: Mail) -> list[int]:
    """The prefixes in the next report."""
    count = len(mail.reports)
    router._report()
    await wait_for(lambda: len(mail.reports) > count)
    return sorted(mail.reports[-1].prefixes)


async def test_every_ingress_hears_once_of_the_prefixes_that_came(router: Any, mail: Mail) -> None:
    other = Mail()
    await other.open()
    await router.subscribe(other.address)
    await call(router, replace(generation(), prefixes=tuple(range(1, 9))), mail)
    await call(router, replace(generation(), prefixes=(1, 2)), mail)
    assert await reported(router, mail) == [1, 2, 4, 5, 7, 8]
    await wait_for(lambda: other.reports)
    assert sorted(other.reports[-1].prefixes) == [1, 2, 4, 5, 7, 8]
    assert await reported(router, mail) == []
    other.close()


async def test_a_router_without_a_prefix_cache_holds_none(router: Any, rig: Rig, mail: Mail) -> None:
    rig.engine.config = replace(rig.engine.config, enable_prefix_caching=False)
    await call(router, replace(generation(), prefixes=(1, 2)), mail)
    assert await reported(router, mail) == []


async def test_a_request_for_another_target_is_refused(router: Any, mail: Mail) -> None:
    for request in (generation(), replace(generation(), target_id="/models/a")):
        await call(router, request, mail)
    await call(router, replace(generation(), target_id="/models/b"), mail)
    error, refused_by = await mail.end()
    assert isinstance(error, TargetError)
    assert (str(error).partition(",")[0], refused_by) == ("this Router serves /models/a", "a")
    assert len(await mail.outputs(16)) == 16


async def test_a_connection_is_kept_until_it_is_lost_and_made_again(router: Any, mail: Mail) -> None:
    async def lose(delivery: Any) -> None:
        await delivery.room()
        delivery.abort()
        while not delivery.is_lost:
            await asyncio.sleep(0)

    delivery = router._delivery(mail.address)
    assert router._delivery(InboxAddress(*mail.address)) is delivery
    await lose(delivery)
    again = router._delivery(mail.address)
    assert again is not delivery
    await lose(again)
    router._report()
    assert router._deliveries == {}


async def test_an_ingress_that_cannot_be_reached_ends_the_request(router: Any, rig: Rig, mail: Mail) -> None:
    mail.close()
    with pytest.raises(TargetError, match="the Ingress cannot be reached"):
        await call(router, generation(max_tokens=400), mail)
    assert rig.engine.scheduler.pool.num_free == rig.engine.scheduler.pool.num_blocks


async def test_cancelling_the_call_frees_the_blocks_at_once(router: Any, rig: Rig, mail: Mail) -> None:
    rig.verifier.gate.clear()
    request = call(router, generation(max_tokens=400), mail)
    while not rig.engine.scheduler.running:
        await asyncio.sleep(0)
    assert rig.engine.scheduler.pool.num_free < rig.engine.scheduler.pool.num_blocks
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert rig.engine.scheduler.pool.num_free == rig.engine.scheduler.pool.num_blocks
    assert router.record_autoscaling_stats() == {NUM_REQUESTS: 0, IS_RECOVERING: 0}
    rig.verifier.gate.set()


async def test_the_draft_is_described_as_soon_as_it_has_joined(router: Any) -> None:
    assert (await router.describe()).draft is None
    router._group.draft_info = INFO
    assert (await router.describe()).draft == INFO


async def test_the_autoscaler_is_told_of_all_sequences_and_that_the_target_is_down(router: Any, mail: Mail) -> None:
    request = call(router, generation(n=2, num_prompts=6, max_tokens=400), mail)
    await mail.outputs(12)
    assert router.record_autoscaling_stats() == {NUM_REQUESTS: 12, IS_RECOVERING: 0}
    router._group.is_available = False
    assert router.record_autoscaling_stats() == {NUM_REQUESTS: 12, IS_RECOVERING: 1}
    request.cancel()
    await asyncio.wait([request])


async def test_a_health_check_has_a_lost_target_restarted(router: Any, rig: Rig) -> None:
    await router.check_health()
    assert rig.group.num_recoveries == 0
    router._group.is_available = False
    await router.check_health()
    while not rig.group.num_recoveries:
        await asyncio.sleep(0)


async def test_a_worker_is_killed_by_the_group_and_a_router_by_itself_once_it_has_answered(
    router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Any] = []

    async def kill(_: Group, process: str) -> bool:
        return process == "draft"

    monkeypatch.setattr(Group, "kill", kill, raising=False)
    monkeypatch.setattr("deployments.router.router.ANSWER_S", 0.0)
    monkeypatch.setattr("deployments.router.router.os.kill", lambda *call: killed.append(call))
    assert await router.kill("draft")
    assert not await router.kill("target")
    assert await router.kill("router")
    assert killed == []
    await wait_for(lambda: killed)
    assert killed == [(os.getpid(), signal.SIGKILL)]
