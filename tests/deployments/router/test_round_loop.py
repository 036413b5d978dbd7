import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.round_times import Calls
from deployments.router.delivery import Stream
from deployments.router.round_loop import HALF_LIFE_S, DrainRate, RoundLoop
from deployments.wire import Generation, Outputs
from engine.control.plan import Plan
from engine.errors import RequestError, TargetError
from engine.protocols import NO_DRAFT, Draft, ProposeRow, Verdict, VerifyRow
from engine.requests.output import RequestOutput
from tests.deployments.fakes import Rig, generation, rounds_of
from tests.engine.targets import SlowDrafter, alternate
from tests.fakes import Clock


async def tokens(loop: RoundLoop, request: Generation) -> list[int]:
    return [token async for outputs in rounds_of(loop, request) for output in outputs for token in output.token_ids]


async def test_a_request_that_another_router_began_gets_the_rest_of_its_tokens(rig: Rig) -> None:
    whole = await tokens(rig.loop, generation())
    rest = replace(generation(n=2), output_token_ids={0: whole[:3]}, finished=frozenset([1]))
    assert await tokens(rig.loop, rest) == whole[3:]
    samples = [sample for metric in rig.metrics.collect() for sample in metric.samples]
    assert [sample.value for sample in samples if sample.name == "vllm:time_to_first_token_seconds_count"] == [1]


async def test_a_rounds_time_is_split_between_its_workers_and_the_router(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("deployments.router.round_loop.time.perf_counter", clock)
    verify, take_outputs = rig.verifier.verify, rig.engine.take_outputs

    def pass_time(seconds: float, calls: Calls) -> None:
        """A worker computes for three quarters of what its calls take."""
        clock.now += seconds
        calls.wait_s += seconds
        calls.compute_s += 0.75 * seconds

    async def slow_verify(rows: Sequence[VerifyRow]) -> list[Verdict]:
        pass_time(4.0, rig.remote_verifier.calls)
        return await verify(rows)

    async def slow_propose(rows: Sequence[ProposeRow]) -> list[Draft]:
        pass_time(1.0, rig.remote_drafter.calls)
        rig.remote_drafter.calls.num_hits += 1
        return [NO_DRAFT] * len(rows)

    def slow_outputs() -> list[RequestOutput]:
        outputs = take_outputs()
        clock.now += 0.5 * len(outputs)
        return outputs

    monkeypatch.setattr(rig.verifier, "verify", slow_verify)
    monkeypatch.setattr(rig.engine.drafter, "propose", slow_propose)
    monkeypatch.setattr(rig.engine, "take_outputs", slow_outputs)
    monkeypatch.setattr(rig.engine.planner, "plan", lambda decoding, **_: Plan(2 if decoding else 0))
    await tokens(rig.loop, generation())
    await asyncio.sleep(0)
    await rig.loop.stop()
    samples = [sample for metric in rig.metrics.collect() for sample in metric.samples]
    shown = {(sample.name, sample.labels.get("phase", "")): sample.value for sample in samples}
    for name, prefill, decode in (
        ("rounds", 1.0, 7.0),
        ("round_seconds", 4.5, 7 * 5.5),
        ("draft_wait_seconds", 0.0, 7.0),
        ("draft_compute_seconds", 0.0, 7 * 0.75),
        ("target_wait_seconds", 4.0, 7 * 4.0),
        ("target_compute_seconds", 3.0, 7 * 3.0),
        ("delivery_seconds", 0.5, 7 * 0.5),
    ):
        assert [shown[f"paceline:{name}_total", phase] for phase in ("prefill", "decode")] == [prefill, decode]
    waits = {
        sample.labels["outcome"]: sample.value for sample in samples if sample.name.endswith("ahead_wait_seconds_count")
    }
    assert waits["hit"] == 7


class Events:
    """Notes when rounds begin and outputs are sent; the target computes while other tasks run."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[str] = []
        verify, self._num_rounds = rig.verifier.verify, 0

        async def slow(rows: Sequence[VerifyRow]) -> list[Verdict]:
            self._num_rounds += 1
            self.noted.append(f"verify {self._num_rounds}")
            verdicts = await verify(rows)
            for _ in range(3):
                await asyncio.sleep(0)
            return verdicts

        monkeypatch.setattr(rig.verifier, "verify", slow)

    def send(self, sent: Outputs) -> None:
        self.noted.append(f"send {[len(output.token_ids) for output in sent.outputs]}")


async def test_outputs_are_sent_while_the_target_has_the_next_round_and_the_first_and_last_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events(rig, monkeypatch)
    async with asyncio.timeout(5):
        await rig.loop.generate(Stream(generation(max_tokens=4), events.send))
    assert events.noted == [
        *("verify 1", "send [1]", "verify 2", "verify 3", "send [1]"),
        *("verify 4", "send [1]", "send [1]"),
    ]
    assert not rig.engine.has_work


async def test_outputs_are_sent_before_the_target_is_restarted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart can take minutes."""
    events = Events(rig, monkeypatch)
    recover = rig.group.recover

    async def noted_recover() -> None:
        events.noted.append("recover")
        await recover()

    monkeypatch.setattr(rig.group, "recover", noted_recover)
    task = asyncio.create_task(rig.loop.generate(Stream(generation(max_tokens=3), events.send)))
    while "verify 2" not in events.noted:
        await asyncio.sleep(0)
    rig.loop.report_loss(TargetError("noticed by a health check"))
    await task
    assert events.noted == ["verify 1", "send [1]", "verify 2", "send [1]", "recover", "verify 3", "send [1]"]


async def test_outputs_that_cannot_be_delivered_end_the_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    Events(rig, monkeypatch)
    deliver = rig.loop._deliver

    def fail() -> None:
        assert not rig.engine._committed or rig.engine.stats.num_generation_tokens < 3
        deliver()

    monkeypatch.setattr(rig.loop, "_deliver", fail)
    with pytest.raises(TargetError, match="the round loop ended"):
        await tokens(rig.loop, generation())


async def test_a_request_that_takes_the_name_of_one_that_left_gets_no_output_of_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Ingress that has lost its connection sends a request again, under the same name."""
    alone = await tokens(rig.loop, generation())
    events = Events(rig, monkeypatch)
    old = asyncio.create_task(tokens(rig.loop, generation()))
    while not rig.engine._committed or rig.engine.scheduler.has_prompts:
        await asyncio.sleep(0)
    old.cancel()
    rest = replace(generation(), output_token_ids={0: alone[:1]})
    await asyncio.wait([old])
    assert await tokens(rig.loop, rest) == alone[1:]
    assert events.noted


async def test_a_request_of_many_sequences_is_one_stream(rig: Rig) -> None:
    rounds = [outputs async for outputs in rounds_of(rig.loop, generation(n=2, num_prompts=2))]
    assert {output.request_id for output in rounds[0]} == {f"request-{index}" for index in range(4)}
    assert len(rounds) == 8


async def test_a_client_that_leaves_in_the_middle_of_a_round_does_not_disturb_the_others(rig: Rig) -> None:
    alone = await tokens(rig.loop, generation())
    leaving = rounds_of(rig.loop, Generation("other", [[9, 9]], generation(max_tokens=400).params, 60.0))
    await anext(leaving)
    staying = asyncio.create_task(tokens(rig.loop, generation()))
    await asyncio.sleep(0)
    rig.verifier.gate.clear()
    await asyncio.sleep(0)
    await leaving.aclose()
    rig.verifier.gate.set()
    assert await staying == alone


async def test_a_refused_request_leaves_nothing_behind(rig: Rig) -> None:
    with pytest.raises(RequestError):
        await tokens(rig.loop, Generation("request", [[1], [999]], generation().params, 60.0))
    assert not rig.engine.has_work


async def test_the_engine_knows_whose_request_it_is_and_how_urgent(rig: Rig) -> None:
    rig.verifier.gate.clear()
    requests = [replace(generation(n=2), request_id=name, priority=n, owner=name) for n, name in enumerate("ab")]
    tasks = [asyncio.create_task(tokens(rig.loop, request)) for request in requests]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    scheduler = rig.engine.scheduler
    known = [(sequence.owner, sequence.priority) for sequence in (*scheduler.running, *scheduler.waiting)]
    assert known == [("a", 0), ("a", 0), ("b", 1), ("b", 1)]
    rig.verifier.gate.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("lose_after", [0, 1, 5])
async def test_a_lost_target_does_not_change_the_tokens(rig: Rig, lose_after: int) -> None:
    alone = await tokens(rig.loop, generation())
    rig.verifier.lose_after = rig.verifier.num_rounds + lose_after
    assert await tokens(rig.loop, generation()) == alone
    assert rig.group.num_recoveries == 1
    rig.loop.check()


async def test_a_target_that_was_restarted_computes_every_committed_token_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV cache is empty. The target of these tests has none, so only the rows that it gets show this."""
    rows: list[tuple[int, int]] = []
    verify = rig.verifier.verify

    async def recorded(batch: Sequence[VerifyRow]) -> list[Verdict]:
        rows.extend((row.start, row.length) for row in batch)
        return await verify(batch)

    monkeypatch.setattr(rig.verifier, "verify", recorded)
    rig.verifier.lose_after = 3
    assert len(await tokens(rig.loop, generation())) == 8
    assert rows == [(0, 3), (3, 1), (4, 1), (5, 1), (0, 6), (6, 1), (7, 1), (8, 1), (9, 1)]


async def test_a_target_may_be_lost_before_its_first_round_is_sent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    run_round = rig.engine.run_round

    async def lost(meanwhile: object) -> bool:
        monkeypatch.setattr(rig.engine, "run_round", run_round)
        raise TargetError("gone")

    monkeypatch.setattr(rig.engine, "run_round", lost)
    assert len(await tokens(rig.loop, generation())) == 8
    assert rig.group.num_recoveries == 1


async def test_a_target_that_stays_lost_is_an_error_and_makes_the_replica_unhealthy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.router.round_loop.RECOVERY_PAUSE_S", 0.0)
    rig.group.num_failures = 100
    rig.verifier.lose_after = 3
    with pytest.raises(TargetError, match="4 times in a row"):
        await tokens(rig.loop, generation())
    with pytest.raises(TargetError):
        rig.loop.check()
    with pytest.raises(TargetError):
        await tokens(rig.loop, generation())


async def test_a_target_lost_while_idle_is_brought_back(rig: Rig) -> None:
    rig.verifier.is_lost = True
    rig.loop.report_loss(TargetError("noticed by a health check"))
    while not rig.group.num_recoveries:
        await asyncio.sleep(0)
    assert len(await tokens(rig.loop, generation())) == 8


async def test_no_progress_in_time_is_unhealthy(rig: Rig) -> None:
    rig.loop.check()
    rig.verifier.gate.clear()
    stream = asyncio.create_task(tokens(rig.loop, generation()))
    while not rig.engine.has_work:
        await asyncio.sleep(0)
    rig.loop._last_progress -= 61
    with pytest.raises(TargetError, match="no round was finished"):
        rig.loop.check()
    rig.verifier.gate.set()
    assert len(await stream) == 8


async def test_a_loss_that_is_reported_during_the_last_round_is_made_good_without_a_request(rig: Rig) -> None:
    rig.verifier.gate.clear()
    last = asyncio.create_task(tokens(rig.loop, generation(max_tokens=1)))
    await asyncio.sleep(0.01)
    rig.loop.report_loss(TargetError("it died"))
    rig.verifier.gate.set()
    await last
    await asyncio.sleep(0.01)
    assert rig.group.num_recoveries == 1


async def test_a_loss_that_is_reported_during_the_recovery_from_it_restarts_nothing_again(rig: Rig) -> None:
    rig.verifier.is_lost = True
    stream = asyncio.create_task(tokens(rig.loop, generation()))
    await rig.group.is_recovering.wait()
    rig.loop.report_loss(TargetError("noticed by a health check"))
    assert len(await stream) == 8
    assert rig.group.num_recoveries == 1


def run(rate: DrainRate, per_s: float, duration_s: float, started: float = 0.0) -> float:
    """Observe rounds of 0.1 s in which so many requests finish; return the time after them."""
    due = 0.0
    rounds = round(duration_s * 10)
    for number in range(rounds + 1):
        due += per_s / 10 if number else 0
        rate.observe(int(due), started + number / 10, has_work=True)
        due -= int(due)
    return started + duration_s


def test_the_last_seconds_count_most() -> None:
    rate = DrainRate()
    now = run(rate, 20.0, 60.0)
    run(rate, 2.0, HALF_LIFE_S, now)
    assert rate.per_s == pytest.approx((20 + 2) / 2, rel=0.05)


def test_time_without_work_does_not_count() -> None:
    rate = DrainRate()
    now = run(rate, 5.0, 60.0)
    before = rate.per_s
    rate.observe(0, now, has_work=False)
    rate.observe(0, now + 3600, has_work=True)
    assert rate.per_s == before


# Two rounds in flight.


def named(nth: int, **params: object) -> Generation:
    return replace(generation(seed=nth, temperature=1.0, **params), request_id=f"request {nth}")


async def test_clients_that_all_leave_while_two_rounds_are_in_flight_leave_the_loop_running(rig: Rig) -> None:
    alternate(rig.engine)
    rig.engine.drafter = SlowDrafter(rig.engine.drafter)
    rig.engine.drafter.delay = 5
    alone = await tokens(rig.loop, generation())
    for turns in range(1, 40, 3):
        clients = [asyncio.create_task(tokens(rig.loop, named(nth, max_tokens=100))) for nth in range(3)]
        while not rig.engine._rounds.is_in_flight:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)
        while rig.engine.has_work:
            await asyncio.sleep(0)
    assert await tokens(rig.loop, generation()) == alone
    assert rig.engine.scheduler.pool.num_free == rig.engine.scheduler.pool.num_blocks


async def test_a_target_that_ends_in_every_round_is_given_up_with_two_rounds_in_flight(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that has only begun is no progress."""
    alternate(rig.engine)

    async def lose(rows: Sequence[VerifyRow]) -> list[Verdict]:
        raise TargetError("lost at once")

    monkeypatch.setattr(rig.verifier, "verify", lose)
    async with asyncio.timeout(10):
        with pytest.raises(TargetError, match="failed 4 times in a row"):
            await asyncio.gather(*(tokens(rig.loop, named(nth)) for nth in range(3)))
