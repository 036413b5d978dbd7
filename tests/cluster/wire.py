"""A server in a thread, and channels to it, for the tests of both ends of a connection."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from cluster.protocol.messages import AnyReply, AnyRequest, Ping, Pong
from cluster.transport.channel import Channel
from cluster.transport.credentials import Credentials
from cluster.transport.endpoint import Endpoint
from cluster.transport.protocol import OnBreak
from cluster.transport.server import SocketServer

NODE_ID = "this node"


def pong(request: AnyRequest) -> AnyReply:
    return Pong(request.round, request.version, 0.0)


def ping(number: int, *, version: int = 1, deadline_s: float = 10.0, released: list[str] | None = None) -> Ping:
    return Ping(number, version, deadline_s, released or [])


def make_server(credentials: Credentials) -> SocketServer:
    return SocketServer("127.0.0.1", NODE_ID, credentials.certificate)


@contextlib.contextmanager
def serving(
    credentials: Credentials, answer: Callable[[AnyRequest], AnyReply | None] = pong, **options: object
) -> Iterator[SocketServer]:
    server = make_server(credentials)
    thread = threading.Thread(target=server.serve, args=(answer,), kwargs=options)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(10)
        assert not thread.is_alive()


@contextlib.contextmanager
def connected(
    endpoint: Endpoint, credentials: Credentials, *, is_near: bool = True, on_break: OnBreak | None = None
) -> Iterator[Channel]:
    channel = Channel(endpoint, credentials, is_near=is_near, version=1, on_break=on_break)
    try:
        yield channel
    finally:
        channel.close()
