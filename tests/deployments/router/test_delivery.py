"""Outputs on their way to the Ingress."""

import asyncio

import pytest

from cluster.protocol.messages import MalformedMessageError
from cluster.transport import ConnectionLostError, Inbox, InboxAddress
from deployments.router.delivery import Deliveries, decode, encode
from deployments.router.load import Load
from engine.protocols import TokenLogprobs
from engine.sequence import RequestOutput

LOGPROBS = [TokenLogprobs(-0.5, 1, [3, 4], [-0.5, -1.25])]
OUTPUT = RequestOutput("a-0", [1, 2], "é\ufffd", "stop", "end", LOGPROBS, 3, 1, 4, 2, prompt_logprobs=LOGPROBS)
PLAIN = RequestOutput("b-1", [7], "", None, None, None, 3, 0, 0, 0)


@pytest.mark.parametrize("output", [OUTPUT, PLAIN, RequestOutput("c-2", [], "", "stop", 5, [], 1, 0, 0, 0)])
def test_an_output_arrives_as_it_was_sent(output: RequestOutput) -> None:
    assert decode(encode(output)) == output


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", encode(PLAIN)[:-1]])
def test_anything_else_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode(payload)


def nobody(_: InboxAddress) -> list[str]:
    """No request may leave."""
    return []


async def test_a_load_is_told_when_it_changes_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    payloads: list[bytes] = []
    inbox = await Inbox.open("127.0.0.1", payloads.append)
    deliveries = Deliveries()
    delivery = deliveries.to(inbox.address)
    deliveries.report("here", 1, 2.0, nobody)  # not connected yet
    await delivery._outbox.room()
    with delivery.holding(2):
        for num_requests in (3, 3, 4):
            deliveries.report("here", num_requests, 2.04, nobody)
    monkeypatch.setattr("deployments.router.delivery.HEARTBEAT_S", 0.0)
    for _ in range(2):
        deliveries.report("here", 4, 2.04, nobody)
    deliveries.report("here", 4, 2.04, lambda address: ["a", "b"] if address == inbox.address else [])
    async with asyncio.timeout(10):
        while len(payloads) < 5:
            await asyncio.sleep(0.001)
    assert list(map(decode, payloads)) == [
        Load("here", *load)
        for load in ((3, 2, 2.0, 1), (4, 2, 2.0, 1), *2 * [(4, 0, 2.0, 1)], (4, 0, 2.0, 1, ("a", "b")))
    ]
    deliveries.close()
    inbox.close()


async def test_a_load_tells_how_many_ingresses_are_connected() -> None:
    payloads: list[bytes] = []
    inboxes = [await Inbox.open("127.0.0.1", payloads.append) for _ in range(2)]
    deliveries = Deliveries()
    ways = [deliveries.to(inbox.address) for inbox in inboxes]
    for way in ways:
        await way._outbox.room()
    async with asyncio.timeout(10):
        deliveries.report("here", 1, 2.0, nobody)
        while len(payloads) < 2:
            await asyncio.sleep(0.001)
        inboxes[0].close()
        while not ways[0].is_lost:
            await asyncio.sleep(0.001)
        deliveries.report("here", 2, 2.0, nobody)
        while len(payloads) < 3:
            await asyncio.sleep(0.001)
    assert list(map(decode, payloads)) == [*2 * [Load("here", 1, 0, 2.0, 2)], Load("here", 2, 0, 2.0, 1)]
    deliveries.close()
    inboxes[1].close()


async def test_outputs_of_a_round_are_one_write_in_the_order_of_their_requests() -> None:
    payloads: list[bytes] = []
    inbox = await Inbox.open("127.0.0.1", payloads.append)
    deliveries = Deliveries()
    delivery = deliveries.to(inbox.address)
    assert deliveries.to(InboxAddress(*inbox.address)) is delivery
    writes: list[list[bytes]] = []
    send = delivery._outbox.send

    def record(round_payloads: list[bytes]) -> None:
        writes.append(round_payloads)
        send(round_payloads)

    delivery._outbox.send = record  # type: ignore[method-assign]
    await asyncio.gather(delivery.put([OUTPUT]), delivery.put([PLAIN, PLAIN]))
    while not writes:
        await asyncio.sleep(0)
    assert [len(write) for write in writes] == [3]
    async with asyncio.timeout(10):
        while len(payloads) < 3:
            await asyncio.sleep(0.01)
    assert list(map(decode, payloads)) == [OUTPUT, PLAIN, PLAIN]
    deliveries.close()
    inbox.close()


async def test_a_lost_way_is_an_error_once_and_then_made_again() -> None:
    inbox = await Inbox.open("127.0.0.1", lambda _: None)
    deliveries = Deliveries()
    delivery = deliveries.to(inbox.address)
    await delivery.put([PLAIN])
    delivery._outbox.connection_lost(None)
    with pytest.raises(ConnectionLostError):
        await delivery.put([PLAIN])
    again = deliveries.to(inbox.address)
    assert again is not delivery
    await again.put([PLAIN])
    assert list(deliveries._by_address.values()) == [again]
    deliveries.close()
    inbox.close()
