"""Real sockets: deadlines, keys, sizes, and replies that nobody waits for."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator

import pytest
import zmq

from cluster import channel as channel_module
from cluster.channel import Channel, DeadlineError, Endpoint, KeyPair, PeerGoneError, Server, make_keys
from cluster.messages import AnyReply, AnyRequest, Ping, Pong, encode


def pong(request: AnyRequest) -> AnyReply:
    return Pong(request.round, request.version, 0.0)


def ping(number: int, *, version: int = 1, deadline_s: float = 10.0, released: list[str] | None = None) -> Ping:
    return Ping(number, version, deadline_s, released or [])


@pytest.fixture
def keys() -> KeyPair:
    return make_keys()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@contextlib.contextmanager
def serving(server: Server, answer=pong) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve, args=(answer,))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


@contextlib.contextmanager
def connected(endpoint: Endpoint, keys: KeyPair, context: zmq.Context, *, version: int = 1) -> Iterator[Channel]:
    channel = Channel(endpoint, keys, version=version, context=context)
    try:
        yield channel
    finally:
        channel.close()


async def test_calls_are_answered(keys, context):
    with (
        serving(Server("127.0.0.1", keys.public)) as server,
        connected(server.endpoint, keys, context) as channel,
    ):
        for number in range(1, 50):
            assert (await channel.call(ping(number))).round == number
        replies = await asyncio.gather(*(channel.call(ping(number)) for number in range(50, 80)))
        assert [reply.round for reply in replies] == list(range(50, 80))
        assert not channel.dropped


async def test_a_silent_peer_costs_the_deadline_and_its_late_reply_is_dropped(keys, context):
    def answer(request: AnyRequest) -> AnyReply:
        if request.round == 1:
            threading.Event().wait(0.5)
        return pong(request)

    with (
        serving(Server("127.0.0.1", keys.public), answer) as server,
        connected(server.endpoint, keys, context) as channel,
    ):
        with pytest.raises(DeadlineError):
            await channel.call(ping(1, deadline_s=0.2))
        assert (await channel.call(ping(2))).round == 2
        assert server.num_overdue == 1


async def test_replies_that_nobody_waits_for_are_dropped_and_counted(keys, context):
    """A raw peer repeats, reorders, mixes in another version and garbage; the call gets its own reply."""
    with raw_peer(context) as (socket, endpoint), connected(endpoint, keys, context) as channel:
        call = asyncio.create_task(channel.call(ping(7)))
        peer, _ = await asyncio.to_thread(socket.recv_multipart)
        for payload in (
            encode(Pong(6, 1, 0.0)),
            encode(Pong(7, 2, 0.0)),
            b"\xc1",
            encode(Pong(7, 1, 0.25)),
            encode(Pong(7, 1, 0.5)),
        ):
            socket.send_multipart([peer, payload])
        assert (await call).compute_s == 0.25
        again = asyncio.create_task(channel.call(ping(8)))
        await asyncio.to_thread(socket.recv_multipart)
        socket.send_multipart([peer, encode(Pong(8, 1, 0.0))])
        await again
        assert channel.dropped == {"late": 2, "version": 1, "malformed": 1}


@contextlib.contextmanager
def raw_peer(context: zmq.Context) -> Iterator[tuple[zmq.Socket, Endpoint]]:
    own = make_keys()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = own
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield socket, Endpoint(f"tcp://127.0.0.1:{port}", own.public)
    finally:
        socket.close()


async def test_another_client_key_is_refused(keys, context):
    with (
        serving(Server("127.0.0.1", keys.public)) as server,
        connected(server.endpoint, make_keys(), context) as stranger,
        connected(server.endpoint, keys, context) as channel,
    ):
        with pytest.raises(DeadlineError):
            await stranger.call(ping(1, deadline_s=0.3))
        await channel.call(ping(1))


async def test_another_server_key_is_refused(keys, context):
    with (
        serving(Server("127.0.0.1", keys.public)) as server,
        connected(Endpoint(server.endpoint.address, make_keys().public), keys, context) as channel,
        pytest.raises(DeadlineError),
    ):
        await channel.call(ping(1, deadline_s=0.3))


async def test_a_plain_client_is_refused(keys, context):
    with serving(Server("127.0.0.1", keys.public)) as server:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(server.endpoint.address)
        socket.send(encode(ping(1)))
        assert not await asyncio.to_thread(socket.poll, 300)
        socket.close()


async def test_malformed_and_oversized_messages_leave_the_server_alive(keys, context, monkeypatch):
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 1000)
    with (
        serving(Server("127.0.0.1", keys.public)) as server,
        connected(server.endpoint, keys, context) as channel,
    ):
        await channel._send(b"\xc1 no message")
        await channel.call(ping(1))
        assert server.num_malformed == 1
        with pytest.raises(DeadlineError):
            await channel.call(ping(2, deadline_s=0.3, released=["x" * 2000]))
        await channel.call(ping(3))


async def test_the_death_notice_ends_the_calls_that_wait(keys, context):
    with raw_peer(context) as (_, endpoint), connected(endpoint, keys, context) as channel:
        call = asyncio.create_task(channel.call(ping(1)))
        await asyncio.sleep(0)
        channel.fail("process 9 died")
        with pytest.raises(PeerGoneError, match="process 9 died"):
            await call
        with pytest.raises(PeerGoneError):
            await channel.call(ping(2))
        with pytest.raises(PeerGoneError):
            await channel.post(ping(3))


async def test_a_killed_process_misses_the_deadline(keys, context):
    """Without a death notice, which Ray would bring, the deadline is what ends the call."""
    program = (
        "import sys\n"
        "from cluster.channel import Server\n"
        "from cluster.messages import Pong\n"
        "server = Server('127.0.0.1', sys.argv[1].encode())\n"
        "print(server.endpoint.address, server.endpoint.public_key.decode(), flush=True)\n"
        "server.serve(lambda request: Pong(request.round, request.version, 0.0))\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, keys.public.decode(), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    address, key = (await process.stdout.readline()).decode().split()
    with connected(Endpoint(address, key.encode()), keys, context) as channel:
        await channel.call(ping(1))
        process.kill()
        await process.wait()
        with pytest.raises(DeadlineError):
            await channel.call(ping(2, deadline_s=0.3))


def test_the_server_polls_without_waiting(keys):
    server = Server("127.0.0.1", keys.public)
    assert not server.poll()
    server.stop()
    server.serve(pong)


def test_a_secret_key_is_not_printed(keys):
    assert keys.secret.decode() not in repr(keys)
