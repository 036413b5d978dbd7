"""An inbox with its senders: order, secret, a slow receiver, and what a broken connection means."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.protocol.messages import MalformedMessageError
from cluster.transport import Inbox, InboxAddress, Outbox
from cluster.transport import inbox as inbox_module
from cluster.transport.credentials import tls_context
from cluster.transport.frames import frame
from tests.waiting import wait_for


class Mail:
    """An open inbox and what has come."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.inbox: Inbox

    def deliver(self, payload: bytes) -> None:
        if payload == b"malformed":
            raise MalformedMessageError("malformed")
        self.messages.append(payload)

    async def until(self, count: int) -> list[bytes]:
        await wait_for(lambda: len(self.messages) >= count)
        return self.messages


@pytest.fixture
async def mail() -> AsyncIterator[Mail]:
    mail = Mail()
    mail.inbox = await Inbox.open("127.0.0.1", mail.deliver)
    yield mail
    mail.inbox.close()


async def read_to_end(address: InboxAddress, data: bytes) -> bytes:
    """Send data as a stranger; return what comes back until the inbox closes the connection."""
    tls = tls_context(None, address.certificate, is_server=False)
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_messages_of_several_senders_come_in_the_order_of_each(mail: Mail) -> None:
    senders = [Outbox(mail.inbox.address) for _ in range(3)]
    for number in range(50):
        for index, sender in enumerate(senders):
            await sender.room()
            sender.post([b"%d %d" % (index, number), b"%d more" % index])
    messages = await mail.until(300)
    for index, sender in enumerate(senders):
        numbers = [message for message in messages if message.startswith(b"%d " % index) and b"more" not in message]
        assert numbers == [b"%d %d" % (index, number) for number in range(50)]
        sender.close()


async def test_a_sender_without_the_secret_is_refused(mail: Mail, caplog: pytest.LogCaptureFixture) -> None:
    assert await read_to_end(mail.inbox.address, bytes(inbox_module.SECRET_BYTES) + frame(b"forged")) == b""
    assert mail.messages == []
    assert "does not know the secret" in caplog.text


async def test_a_secret_may_come_in_pieces_but_not_late(mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "_HANDSHAKE_S", 0.2)
    address = mail.inbox.address
    assert await read_to_end(address, address.secret[:5]) == b""
    tls = tls_context(None, address.certificate, is_server=False)
    _, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
    for piece in (address.secret[:5], address.secret[5:] + frame(b"whole")[:3], frame(b"whole")[3:]):
        writer.write(piece)
        await writer.drain()
    assert await mail.until(1) == [b"whole"]
    writer.close()


async def test_a_sender_trusts_only_the_inbox_with_the_certificate(mail: Mail) -> None:
    other = await Inbox.open("127.0.0.1", mail.deliver)
    sender = Outbox(mail.inbox.address._replace(port=other.address.port))
    assert not await sender.room()
    other.close()


async def test_a_malformed_message_ends_its_connection_only(mail: Mail) -> None:
    bad, good = Outbox(mail.inbox.address), Outbox(mail.inbox.address)
    for sender in (bad, good):
        await sender.room()
    bad.post([b"malformed"])
    await wait_for(lambda: bad.is_lost)
    good.post([b"fine"])
    assert await mail.until(1) == [b"fine"]
    good.close()


def test_the_secret_is_not_shown() -> None:
    address = InboxAddress("host", 1, "certificate", b"hidden")
    assert "hidden" not in repr(address)


async def test_what_is_sent_before_the_connection_is_made_comes_first() -> None:
    messages: list[bytes] = []
    inbox = await Inbox.open("127.0.0.1", messages.append)
    outbox = Outbox(inbox.address)
    outbox.post([b"1", b"2"])
    assert not outbox.has_room
    assert await outbox.room()
    outbox.post([b"3"])
    outbox.close()  # which sends what was written
    await wait_for(lambda: len(messages) == 3)
    assert messages == [b"1", b"2", b"3"]
    inbox.close()


async def test_a_sender_is_told_that_the_inbox_does_not_read() -> None:
    received = 0

    def count(payload: bytes) -> None:
        nonlocal received
        received += len(payload)

    inbox = await Inbox.open("127.0.0.1", count)
    outbox = Outbox(inbox.address)
    await outbox.room()
    await wait_for(lambda: inbox._senders)
    (connection,) = inbox._senders
    connection._transport.pause_reading()
    sent = 0
    while outbox.has_room:
        outbox.post([bytes(2**20)])
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


async def test_a_loss_is_told_once() -> None:
    reasons: list[str] = []
    inbox = await Inbox.open("127.0.0.1", lambda _: None)
    outbox = Outbox(inbox.address, reasons.append)
    await outbox.room()
    await wait_for(lambda: inbox._senders)
    outbox.pause_writing()
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    inbox.close()
    assert not await waiting
    outbox.post([b"lost"])
    outbox.close()
    await asyncio.sleep(0)
    assert (outbox.is_lost, outbox.has_room, len(reasons)) == (True, False, 1)


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_connection_that_cannot_be_made_is_lost(is_closed: bool) -> None:
    reasons: list[str] = []
    inbox = await Inbox.open("127.0.0.1", lambda _: None)
    inbox.close()
    outbox = Outbox(InboxAddress(*inbox.address), reasons.append)
    if is_closed:
        outbox.close()
    assert not await outbox.room()
    assert len(reasons) == 1
    assert ("the outbox was closed" if is_closed else "cannot connect") in reasons[0]
