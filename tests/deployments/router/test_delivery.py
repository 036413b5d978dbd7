"""The outputs of a request, gathered, and messages on their way to the Ingress."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from deployments.router import delivery as delivery_module
from deployments.router.delivery import Delivery, Stream
from deployments.wire import End, Generation, Outputs, Report
from engine.errors import RequestError
from tests.deployments.fakes import LocalOutputs, Rig, generation, output
from tests.deployments.router.conftest import Mail
from tests.waiting import wait_for

REPORT = Report("here", None, 3, 2, 2.0, 1)


def named(request_id: str, **options: int) -> Generation:
    request = generation(**options)
    return Generation(request_id, request.prompts, request.params, 60.0)


async def test_a_round_is_one_write_in_the_order_of_its_requests_and_may_come_before_the_connection(mail: Mail) -> None:
    delivery = Delivery(mail.address)
    writes: list[int] = []
    send = delivery.send

    def record(payloads: Iterable[bytes]) -> None:
        writes.append(len(list(payloads)))
        send(payloads)

    delivery.send = record  # type: ignore[method-assign]
    end = End.by(RequestError("bad"), "b")
    with delivery.stream(named("a")) as first, delivery.stream(named("b")) as second:
        for token in (1, 2):
            first.put([output(token, request_id="a")])
            second.put([output(token, request_id="b")])
        delivery.end(end)
        messages = await mail.until(5)
    assert writes == [5]
    assert messages == [
        *(Outputs(request_id, [output(token, request_id=request_id)]) for token in (1, 2) for request_id in "ab"),
        end,
    ]
    delivery.close()


async def test_a_report_is_sent_when_it_changes_and_now_and_then(mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    delivery = Delivery(mail.address)
    delivery.report(REPORT)  # not connected yet
    await delivery.room()
    changed = Report("here", None, 4, 2, 2.0, 1)
    for report in (REPORT, REPORT, changed):
        delivery.report(report)
    monkeypatch.setattr(delivery_module, "HEARTBEAT_S", 0.0)
    delivery.report(changed)
    assert await mail.until(3) == [REPORT, changed, changed]
    delivery.pause_writing()
    delivery.report(REPORT)  # the Ingress does not read
    assert not delivery._unsent
    delivery.close()


async def test_the_movable_requests_are_whole_and_the_newest_come_first(
    mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = Delivery(mail.address)
    assert not delivery.has_requested
    with delivery.stream(named("a")) as a, delivery.stream(named("b", n=2)) as b, delivery.stream(named("c")) as c:
        assert (delivery.has_requested, delivery.num_sequences) == (True, 4)
        for stream in (a, b, c):
            stream.unfinished.update(sequence.request_id for sequence in stream.request.sequences())
        assert delivery.movable(frozenset(["a-0", "b-0", "b-1", "c-0", "of another Ingress-0"])) == ("c", "b", "a")
        assert delivery.movable(frozenset(["a-0", "b-1"])) == ("a",), "a sequence of b has begun"
        assert delivery.movable(frozenset()) == ()
        monkeypatch.setattr(delivery_module, "MAX_MOVABLE", 2)
        assert delivery.movable(frozenset(["a-0", "b-0", "b-1", "c-0"])) == ("c", "b")
    assert delivery.num_sequences == 0
    delivery.close()


async def test_what_was_sent_before_the_end_arrives(mail: Mail) -> None:
    delivery = Delivery(mail.address)
    await delivery.room()
    delivery.deliver(REPORT)
    delivery.close()
    assert await mail.until(1) == [REPORT]


class Sent:
    """A stream of two sequences, and the tokens that it has sent."""

    def __init__(self, interval_s: float, **settings: Any) -> None:
        self.deliveries: list[list[int]] = []
        self.stream = Stream(replace(generation(n=2), interval_s=interval_s, **settings), self._take)
        self.stream.unfinished |= {"request-0", "request-1"}

    def _take(self, message: Outputs) -> None:
        self.deliveries.append([token for output in message.outputs for token in output.token_ids])


async def test_the_first_round_is_sent_at_once_and_those_within_the_interval_with_the_first_after_it() -> None:
    sent = Sent(3600.0)
    for token in range(3):
        sent.stream.put([output(token)])
    assert sent.deliveries == [[0]]
    sent.stream._due = 0.0  # the interval is over, and nothing else is due
    sent.stream.put([output(3)])
    sent.stream.put([output(4)])
    assert sent.deliveries == [[0], [1, 2, 3]]
    sent.stream.close()


async def test_outputs_that_no_round_follows_are_sent_after_the_interval() -> None:
    sent = Sent(0.02)
    sent.stream.put([output(0)])
    sent.stream.put([output(1)])
    await wait_for(lambda: len(sent.deliveries) == 2)
    assert sent.deliveries == [[0], [1]]


@pytest.mark.parametrize("gathers_first", [False, True])
async def test_the_last_round_of_a_sequence_is_sent_at_once(gathers_first: bool) -> None:
    sent = Sent(3600.0, gathers_first=gathers_first)
    sent.stream.put([output(0), output(7, choice=1)])
    sent.stream.put([output(1)])
    assert sent.deliveries == ([] if gathers_first else [[0, 7]])
    sent.stream.put([output(2, finish_reason="stop"), output(8, choice=1)])
    assert sent.deliveries[-1][-3:] == [1, 2, 8]
    assert not sent.stream.ended.done()
    sent.stream.put([output(9, choice=1)])
    sent.stream.put([output(10, finish_reason="length", choice=1)])
    assert sent.deliveries[-1] == [9, 10]
    assert sent.stream.ended.result() is None
    assert sent.stream._timer is None


async def test_a_closed_stream_sends_nothing_by_itself() -> None:
    sent = Sent(0.001)
    sent.stream.put([output(0)])
    sent.stream.put([output(1)])
    sent.stream.close()
    await asyncio.sleep(0.01)
    assert sent.deliveries == [[0]]


async def test_a_deadline_withholds_nothing() -> None:
    rig = Rig()
    outputs = LocalOutputs(rig.loop, replace(generation(max_tokens=400), interval_s=3600.0, timeout_s=0.5))
    assert len(await outputs.next()) == 1
    rounds = rig.verifier.num_rounds
    while rig.verifier.num_rounds < rounds + 3:
        await asyncio.sleep(0)
    rig.verifier.gate.clear()
    assert len(await outputs.next()) >= 2
    with pytest.raises(TimeoutError, match=r"0\.5 s"):
        await outputs.next()
    rig.verifier.gate.set()
    await rig.loop.stop()
