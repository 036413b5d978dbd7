"""An outbox whose inbox is slow, closes, or was never there."""

import asyncio

import pytest

from cluster.transport import ConnectionLostError, Inbox, InboxAddress, Outbox


async def test_a_sender_waits_while_the_inbox_does_not_read() -> None:
    received = 0

    def count(payload: bytes) -> None:
        nonlocal received
        received += len(payload)

    inbox = await Inbox.open("127.0.0.1", count)
    outbox = Outbox(inbox.address)
    assert not outbox.has_room
    await outbox.room()
    while not inbox._connections:
        await asyncio.sleep(0.01)
    (connection,) = inbox._connections
    connection._transport.pause_reading()
    sent = 0
    while outbox.has_room:
        outbox.send([bytes(2**20)])
        sent += 2**20
        await asyncio.sleep(0.01)
    connection._transport.resume_reading()
    assert sent < 2**28
    async with asyncio.timeout(30):
        await outbox.room()
        while received < sent:
            await asyncio.sleep(0.01)
    outbox.close()
    inbox.close()


async def test_an_inbox_that_closes_is_an_error_for_those_who_wait_and_later_ones() -> None:
    inbox = await Inbox.open("127.0.0.1", lambda _: None)
    outbox = Outbox(inbox.address)
    await outbox.room()
    while not inbox._connections:
        await asyncio.sleep(0.01)
    outbox.pause_writing()
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    inbox.close()
    with pytest.raises(ConnectionLostError):
        await waiting
    with pytest.raises(ConnectionLostError):
        await outbox.room()
    outbox.send([b"lost"])
    assert outbox.is_lost
    assert not outbox.has_room


async def test_an_inbox_that_is_not_there_is_an_error() -> None:
    inbox = await Inbox.open("127.0.0.1", lambda _: None)
    inbox.close()
    outbox = Outbox(inbox.address)
    with pytest.raises(ConnectionLostError, match="cannot connect"):
        await outbox.room()


async def test_closing_sends_what_was_written_and_ends_those_who_wait() -> None:
    messages: list[bytes] = []
    inbox = await Inbox.open("127.0.0.1", messages.append)
    outbox = Outbox(inbox.address)
    await outbox.room()
    outbox.send([b"last"])
    outbox.close()
    async with asyncio.timeout(10):
        while not messages:
            await asyncio.sleep(0.01)
    assert messages == [b"last"]
    unconnected = Outbox(InboxAddress(*inbox.address))
    unconnected.close()
    with pytest.raises(ConnectionLostError, match="closed"):
        await unconnected.room()
    inbox.close()
