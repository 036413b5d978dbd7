"""Endpoint: where a worker listens; and the TCP options that both ends of a connection set."""

import socket
from typing import NamedTuple

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, probes


class Endpoint(NamedTuple):
    """Where a worker listens, and the certificate that proves its identity.

    Attributes:
        node_id: Ray's id of the worker's node; only clients on that node may use `path`.
        path: of a Unix socket that accepts one connection; empty if it could not be created.
    """

    node_id: str
    path: str
    host: str
    port: int
    certificate: str


def set_tcp_options(connection: socket.socket) -> None:
    """Send small messages without delay, and detect within half a minute that the peer's node has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
