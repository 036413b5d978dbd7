"""A server in a thread, and channels to it, for the tests of both ends of the wire."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from cluster.protocol.messages import AnyReply, AnyRequest, Ping, Pong
from cluster.transport.channel import Channel
from cluster.transport.credentials import Credentials
from cluster.transport.endpoint import Endpoint
from cluster.transport.server import Server


def pong(request: AnyRequest) -> AnyReply:
    return Pong(request.round, request.version, 0.0)


def ping(number: int, *, version: int = 1, deadline_s: float = 10.0, released: list[str] | None = None) -> Ping:
    return Ping(number, version, deadline_s, released or [])


@contextlib.contextmanager
def serving(
    credentials: Credentials, answer: Callable[[AnyRequest], AnyReply | None] = pong, **options: object
) -> Iterator[Server]:
    server = Server("127.0.0.1", credentials.certificate)
    thread = threading.Thread(target=server.serve, args=(answer,), kwargs=options)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


@contextlib.contextmanager
def connected(endpoint: Endpoint, credentials: Credentials, *, version: int = 1) -> Iterator[Channel]:
    channel = Channel(endpoint, credentials, version=version)
    try:
        yield channel
    finally:
        channel.close()


def from_afar(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint as another node sees it, which has no such Unix socket."""
    return endpoint._replace(path="")
