"""Real sockets: deadlines, connections that break, and replies that no call waits for."""

import asyncio
import contextlib
import json
import socket
import sys
from pathlib import Path

import pytest

from cluster.protocol.messages import Pong, PrefixMissing, encode
from cluster.transport import ConnectionLostError, Connector, DeadlineError, Endpoint, Link, PeerGoneError
from cluster.transport import frames as frames_module
from cluster.transport.credentials import make_credentials
from cluster.transport.frames import FrameReader, frame
from tests.cluster.fakes import FakeConnection
from tests.cluster.wire import NODE_ID, linked, ping, raw_peer, read_one, serving

ON_SAME_AND_OTHER_NODE = pytest.mark.parametrize("is_same_node", [True, False], ids=["same node", "other node"])
LARGE = ["x" * 1000] * 10_000


class Peer:
    """A raw peer that does what a test says, and a link to it."""

    def __init__(self, endpoint: Endpoint, connections: asyncio.Queue, credentials) -> None:
        self.endpoint, self.connections, self.breaks = endpoint, connections, asyncio.Queue()
        options = {"is_same_node": True, "version": 1, "on_break": self.breaks.put_nowait}
        self.link = Link(endpoint, credentials, **options)
        self.accepted = []

    async def accept(self):
        """Return the reader and the writer of the next connection, which would end if nobody kept them."""
        self.accepted.append(await self.connections.get())
        return self.accepted[-1]


@pytest.fixture
async def peer(credentials, tmp_path):
    async with raw_peer(credentials, tmp_path) as (endpoint, connections):
        peer = Peer(endpoint, connections, credentials)
        yield peer
        peer.link.close()


@ON_SAME_AND_OTHER_NODE
async def test_calls_are_answered(credentials, is_same_node):
    with (
        serving(credentials.certificate) as server,
        linked(server.endpoint, credentials, is_same_node=is_same_node) as link,
    ):
        for number in range(1, 50):
            assert (await link.call(ping(number))).round == number
        replies = await asyncio.gather(*(link.call(ping(number)) for number in range(50, 80)))
        assert [reply.round for reply in replies] == list(range(50, 80))
        left = await link.begin(ping(90))
        left.cancel()
        await asyncio.sleep(0)
        assert not link._calls


@ON_SAME_AND_OTHER_NODE
def test_calls_are_answered_on_the_event_loop_that_ray_uses(credentials, is_same_node):
    uvloop = pytest.importorskip("uvloop")
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        loop.run_until_complete(test_calls_are_answered(credentials, is_same_node))


@pytest.mark.parametrize(("node_id", "is_tls"), [(NODE_ID, False), ("another node", True)])
async def test_the_node_decides_between_unix_socket_and_tls(node_id, is_tls):
    """The path of another node's socket may exist here too, and belong to another process."""
    connector = Connector(node_id)
    with serving(connector.identity) as server:
        assert server.endpoint.path
        link = connector.connect(server.endpoint, version=3)
        await link.call(ping(1, version=3))
        assert (link._connection._transport.get_extra_info("ssl_object") is not None) == is_tls
        link.close()


@ON_SAME_AND_OTHER_NODE
async def test_large_messages_go_both_ways(credentials, is_same_node):
    """Larger than any socket's buffers, so that both ends meet messages in pieces."""
    words = [f"{i:09}" for i in range(500_000)]

    def answer(request):
        return PrefixMissing(request.round, request.version, 0.0, request.released)

    with (
        serving(credentials.certificate, answer) as server,
        linked(server.endpoint, credentials, is_same_node=is_same_node) as link,
    ):
        for reply in await asyncio.gather(*(link.call(ping(number, released=words)) for number in (1, 2))):
            assert reply.request_ids == words


async def test_replies_that_no_call_waits_for_are_dropped(peer):
    """The peer repeats, reorders, mixes in another version and garbage; the call gets its own reply."""
    with pytest.raises(DeadlineError, match=r"^no reply to round 6 within 0\.2 s$"):
        await peer.link.call(ping(6, deadline_s=0.2))
    reader, writer = await peer.accept()
    assert await read_one(reader) == encode(ping(6, deadline_s=0.2))
    call = asyncio.create_task(peer.link.call(ping(7)))
    await read_one(reader)
    for payload in (
        encode(Pong(6, 1, 0.0)),
        encode(Pong(7, 2, 0.0)),
        b"\xc1",
        encode(Pong(7, 1, 0.25)),
        encode(Pong(7, 1, 0.5)),
    ):
        writer.write(frame(payload))
    assert (await call).compute_s == 0.25
    again = asyncio.create_task(peer.link.call(ping(8)))
    await read_one(reader)
    writer.write(frame(encode(Pong(8, 1, 0.0))))
    await again


async def test_a_broken_connection_ends_the_calls_is_reported_and_the_next_call_makes_another(peer):
    calls = [asyncio.create_task(peer.link.call(ping(number))) for number in (1, 2)]
    reader, writer = await peer.accept()
    await read_one(reader)
    writer.write(frame(encode(Pong(1, 1, 0.0)))[:-1])  # half a reply must not reach the next connection
    writer.close()
    for call in calls:
        with pytest.raises(ConnectionLostError):
            await call
    assert await peer.breaks.get()
    third = asyncio.create_task(peer.link.call(ping(3)))
    reader, writer = await peer.accept()
    assert await read_one(reader) == encode(ping(3))
    writer.write(frame(encode(Pong(3, 1, 0.0))))
    assert (await third).round == 3
    peer.link.close()
    await asyncio.sleep(0.1)
    assert peer.breaks.empty()  # closing the link is not a break


async def test_a_peer_that_announces_too_much_is_left(peer, monkeypatch):
    monkeypatch.setattr(frames_module, "MAX_MESSAGE_BYTES", 1000)
    call = asyncio.create_task(peer.link.call(ping(1)))
    _, writer = await peer.accept()
    writer.write(frame(b"x" * 1001)[:100])
    with pytest.raises(ConnectionLostError):
        await call


async def test_a_message_that_the_peer_does_not_read_waits_for_the_deadline_only(peer):
    await peer.link.post(ping(1, released=LARGE))
    with pytest.raises(DeadlineError):
        await peer.link.post(ping(2, deadline_s=0.2, released=LARGE))
    reader, _ = await peer.accept()
    third = asyncio.create_task(peer.link.post(ping(3)))
    frames, payloads = FrameReader(), []
    while not payloads or payloads[-1] != encode(ping(3)):
        payloads += frames.feed(await reader.read(2**20))
    await third
    assert len(payloads) == 2  # the second was never begun


async def test_closing_ends_all_calls(peer):
    """Calls that wait for a reply, for room, and later ones."""
    waits_for_reply = asyncio.create_task(peer.link.call(ping(1)))
    await peer.accept()
    await peer.link.post(ping(2, released=LARGE))
    waits_for_room = asyncio.create_task(peer.link.call(ping(3, deadline_s=60)))
    await asyncio.sleep(0.1)
    peer.link.close("process 9 died")
    for call in (waits_for_reply, waits_for_room, peer.link.call(ping(4)), peer.link.post(ping(5))):
        with pytest.raises(PeerGoneError, match="process 9 died"):
            await call


async def test_a_unix_socket_that_does_not_answer_is_replaced_by_tls(credentials, tmp_path):
    """Such as the socket of a worker that was killed before its client connected."""
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with (
        serving(credentials.certificate) as server,
        linked(server.endpoint._replace(path=str(path)), credentials) as link,
    ):
        await link.call(ping(1))


async def test_a_unix_socket_is_used_once(peer, credentials):
    """Once the worker has removed its socket, another process could create one at the same path."""
    await peer.accept()  # of the peer's own link
    with (
        serving(credentials.certificate) as server,
        linked(server.endpoint._replace(path=peer.endpoint.path), credentials) as link,
    ):
        call = asyncio.create_task(link.call(ping(1)))
        _, writer = await peer.accept()
        writer.close()
        with pytest.raises(ConnectionLostError):
            await call
        assert (await link.call(ping(2))).round == 2
        assert peer.connections.empty()


async def test_the_end_of_another_connection_does_not_break_the_current_one(credentials):
    with serving(credentials.certificate) as server, linked(server.endpoint, credentials) as link:
        await link.call(ping(1))
        call = asyncio.create_task(link.call(ping(2)))
        await asyncio.sleep(0)
        link._lose(FakeConnection(bytes), "it was never used")
        assert (await call).round == 2


@pytest.mark.parametrize("unknown", ["client", "server"])
async def test_a_peer_with_an_unknown_certificate_gets_no_answer(credentials, unknown):
    """It has the same name as the expected one, but another key, which is not printed."""
    other = make_credentials()
    assert "PRIVATE KEY" in other.secret_key
    assert "PRIVATE" not in repr(other)
    with serving(credentials.certificate) as server:
        endpoint, presented = server.endpoint, other
        if unknown == "server":
            endpoint, presented = endpoint._replace(certificate=other.certificate), credentials
        with (
            linked(endpoint, presented, is_same_node=False) as link,
            pytest.raises((DeadlineError, ConnectionLostError)),
        ):
            await link.call(ping(1, deadline_s=0.3))
        with linked(server.endpoint, credentials, is_same_node=False) as link:
            await link.call(ping(1))


async def test_a_worker_that_is_not_there_yet_is_waited_for(credentials):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    endpoint = Endpoint("another node", "", "127.0.0.1", port, make_credentials().certificate)
    link = Link(endpoint, credentials, is_same_node=False, version=1)
    with pytest.raises(DeadlineError, match=r"cannot connect to the worker: .*refused|Connect call failed"):
        await link.call(ping(1, deadline_s=0.2))
    call = asyncio.create_task(link.call(ping(2, deadline_s=60)))
    await asyncio.sleep(0)
    link.close("process 9 died")
    with pytest.raises(PeerGoneError, match="process 9 died"):
        await call


async def test_a_killed_process_ends_the_call_at_once(credentials):
    """The kernel closes its sockets: sooner than Ray's death notice, and than the deadline."""
    program = (
        "import json, sys, time\n"
        "from cluster.transport import Server\n"
        "server = Server('127.0.0.1', 'this node')\n"
        "listener = server.listen(sys.argv[1], lambda request: time.sleep(60))\n"
        "print(json.dumps(listener.endpoint), flush=True)\n"
        "server.serve()\n"
    )
    command = (sys.executable, "-c", program, credentials.certificate)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    endpoint = Endpoint(*json.loads(await process.stdout.readline()))
    with linked(endpoint, credentials) as link:
        call = asyncio.create_task(link.call(ping(1, deadline_s=60)))
        while Path(endpoint.path).exists():  # noqa: ASYNC240
            await asyncio.sleep(0.01)
        process.kill()
        await process.wait()
        with pytest.raises(ConnectionLostError):
            await call
        with pytest.raises(DeadlineError):
            await link.call(ping(2, deadline_s=0.2))
