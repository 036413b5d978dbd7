"""Endpoint: where a worker is reached; and what both ends of a connection between nodes ask of it."""

import socket
from typing import NamedTuple

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, times


class Endpoint(NamedTuple):
    """Where a worker listens, and the certificate that proves it is that worker.

    Attributes:
        path: of a Unix socket on the worker's node, good for one connection; empty where it could not be made.
    """

    path: str
    host: str
    port: int
    certificate: str


def tune(connection: socket.socket) -> None:
    """Have a TCP connection send at once, and break half a minute after its peer has gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # on Linux all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
