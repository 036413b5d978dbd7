"""An inbox with its senders: order, credentials, a slow receiver, and what a broken connection means."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from cluster.protocol.messages import MalformedMessageError
from cluster.transport import Outbox, open_inbox
from cluster.transport.credentials import make_credentials, tls_context
from cluster.transport.frames import FrameConnection, frame
from tests.waiting import wait_for


class Mail:
    """An open inbox and what has come."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    async def open(self) -> None:
        self.server, self.address = await open_inbox("127.0.0.1", self.deliver)

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
    await mail.open()
    yield mail
    mail.server.close()


async def test_messages_of_several_senders_come_in_the_order_of_each(mail):
    senders = [Outbox(mail.address) for _ in range(3)]
    for number in range(50):
        for index, sender in enumerate(senders):
            await sender.room()
            sender.post(b"%d %d" % (index, number))
            sender.post(b"%d more" % index)
    messages = await mail.until(300)
    for index, sender in enumerate(senders):
        numbers = [message for message in messages if message.startswith(b"%d " % index) and b"more" not in message]
        assert numbers == [b"%d %d" % (index, number) for number in range(50)]
        sender.close()


def anonymous() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("has_certificate", [False, True])
async def test_a_sender_without_the_credentials_is_refused(mail, has_certificate):
    address = mail.address
    stranger = tls_context(make_credentials(), address.certificate, is_server=False)
    tls = stranger if has_certificate else anonymous()
    with suppress(ssl.SSLError, ConnectionError):
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
        writer.write(frame(b"forged"))
        async with asyncio.timeout(10):
            assert await reader.read(1) == b"", "a client of TLS 1.3 learns here that it is refused"
    assert mail.messages == []


async def test_a_sender_trusts_only_the_inbox_with_the_certificate(mail):
    server, address = await open_inbox("127.0.0.1", mail.deliver)
    sender = Outbox(mail.address._replace(port=address.port, senders=address.senders))
    assert not await sender.room()
    server.close()


async def test_a_sender_is_told_that_the_inbox_does_not_read(mail, monkeypatch):
    connections: list[FrameConnection] = []
    made = FrameConnection.connection_made

    def connection_made(connection: FrameConnection, transport: asyncio.BaseTransport) -> None:
        made(connection, transport)
        connections.append(connection)

    monkeypatch.setattr(FrameConnection, "connection_made", connection_made)
    outbox = Outbox(mail.address)
    await outbox.room()
    await wait_for(lambda: len(connections) == 2)
    (connection,) = (connection for connection in connections if connection is not outbox)
    connection._transport.pause_reading()
    sent = 0
    while outbox.has_room:
        outbox.post(bytes(2**20))
        sent += 1
        await asyncio.sleep(0.01)
    connection._transport.resume_reading()
    assert sent < 2**8
    async with asyncio.timeout(30):
        await outbox.room()
        await mail.until(sent)
    outbox.close()


async def test_a_loss_is_told_once(mail):
    reasons: list[str] = []
    outbox = Outbox(mail.address, reasons.append)
    await outbox.room()
    outbox.pause_writing()
    waiting = asyncio.create_task(outbox.room())
    outbox.post(b"malformed")
    assert not await waiting
    outbox.post(b"lost")
    outbox.close()
    await asyncio.sleep(0)
    assert (outbox.is_lost, outbox.has_room, len(reasons)) == (True, False, 1)


async def test_what_is_sent_before_the_connection_is_made_comes_first(mail):
    outbox = Outbox(mail.address)
    outbox.post(b"1")
    outbox.post(b"2")
    assert not outbox.has_room
    assert await outbox.room()
    outbox.post(b"3")
    outbox.close()  # which sends what was written
    assert await mail.until(3) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_connection_that_cannot_be_made_is_lost(mail, is_closed):
    reasons: list[str] = []
    mail.server.close()
    outbox = Outbox(mail.address, reasons.append)
    if is_closed:
        outbox.close()
    assert not await outbox.room()
    assert len(reasons) == 1
    assert ("the outbox was closed" if is_closed else "cannot connect") in reasons[0]
