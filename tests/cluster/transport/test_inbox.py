"""An inbox with its senders: order, secret, and what a broken connection means."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.protocol.messages import MalformedMessageError
from cluster.transport import ConnectionLostError, Inbox, Outbox
from cluster.transport import inbox as inbox_module
from cluster.transport.credentials import tls_context
from cluster.transport.frames import frame


class Mail:
    """An open inbox and what has come."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.has_come = asyncio.Event()
        self.inbox: Inbox

    def deliver(self, payload: bytes) -> None:
        if payload == b"malformed":
            raise MalformedMessageError("malformed")
        self.messages.append(payload)
        self.has_come.set()

    async def until(self, count: int) -> list[bytes]:
        async with asyncio.timeout(10):
            while len(self.messages) < count:
                self.has_come.clear()
                await self.has_come.wait()
        return self.messages


@pytest.fixture
async def mail() -> AsyncIterator[Mail]:
    mail = Mail()
    mail.inbox = await Inbox.open("127.0.0.1", mail.deliver)
    yield mail
    mail.inbox.close()


async def read_to_end(address: inbox_module.InboxAddress, data: bytes) -> bytes:
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
            sender.send([b"%d %d" % (index, number), b"%d more" % index])
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
    with pytest.raises(ConnectionLostError, match="cannot connect"):
        await sender.room()
    other.close()


async def test_a_malformed_message_ends_its_connection_only(mail: Mail) -> None:
    bad, good = Outbox(mail.inbox.address), Outbox(mail.inbox.address)
    for sender in (bad, good):
        await sender.room()
    bad.send([b"malformed"])
    async with asyncio.timeout(10):
        while not bad.is_lost:
            await asyncio.sleep(0.01)
    good.send([b"fine"])
    assert await mail.until(1) == [b"fine"]
    good.close()


def test_the_secret_is_not_shown() -> None:
    address = inbox_module.InboxAddress("host", 1, "certificate", b"hidden")
    assert "hidden" not in repr(address)
