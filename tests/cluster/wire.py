"""A server in a thread, links to it, and a raw peer, for the tests of both ends of a connection."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from cluster.protocol.messages import AnyReply, AnyRequest, Ping, Pong
from cluster.transport import Endpoint, Link, Listener, OnBreak, Server
from cluster.transport.credentials import Credentials, make_credentials, tls_context
from cluster.transport.frames import FrameReader
from cluster.workers.draft_worker import DraftWorker

NODE_ID = "this node"


def pong(request: AnyRequest) -> AnyReply:
    return Pong(request.round, request.version, 0.0)


def ping(number: int, *, version: int = 1, deadline_s: float = 10.0, released: list[str] | None = None) -> Ping:
    return Ping(number, version, deadline_s, released or [])


@contextlib.contextmanager
def in_thread(served: Server | DraftWorker, *arguments: object) -> Iterator[None]:
    """Serve until the block ends."""
    thread = threading.Thread(target=served.serve, args=arguments)
    thread.start()
    try:
        yield
    finally:
        served.close()
        thread.join(10)
        assert not thread.is_alive()


@contextlib.contextmanager
def serving(
    client_identity: str,
    answer: Callable[[AnyRequest], AnyReply | None] = pong,
    work: Callable[[], bool] = lambda: False,
) -> Iterator[Listener]:
    """Serve one client, and yield its listener."""
    server = Server("127.0.0.1", NODE_ID)
    listener = server.listen(client_identity, answer)
    with in_thread(server, work):
        yield listener


@contextlib.contextmanager
def linked(
    endpoint: Endpoint, credentials: Credentials, *, is_same_node: bool = True, on_break: OnBreak | None = None
) -> Iterator[Link]:
    link = Link(endpoint, credentials, is_same_node=is_same_node, version=1, on_break=on_break)
    try:
        yield link
    finally:
        link.close()


@contextlib.asynccontextmanager
async def raw_peer(
    credentials: Credentials, folder: Path
) -> AsyncIterator[tuple[Endpoint, "asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]"]]:
    """A worker that does what the test says; its connections are put into the queue."""
    connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.put_nowait((reader, writer))

    peer_credentials = make_credentials()
    path = folder / "peer.sock"
    unix_server = await asyncio.start_unix_server(accept, path)
    tcp_server = await asyncio.start_server(
        accept, "127.0.0.1", ssl=tls_context(peer_credentials, credentials.certificate, is_server=True)
    )
    try:
        yield (
            Endpoint(NODE_ID, str(path), *tcp_server.sockets[0].getsockname(), peer_credentials.certificate),
            connections,
        )
    finally:
        unix_server.close()
        tcp_server.close()


async def read_one(reader: asyncio.StreamReader) -> bytes:
    frames = FrameReader()
    while not (payloads := frames.feed(await reader.read(1000))):
        pass
    return payloads[0]
