"""Carries requests from the Router to its workers and replies back, and a Router's messages to an Ingress's inbox.

Processes of one node use a Unix socket, processes of two nodes mutual TLS; an inbox always uses mutual TLS. The rest of
`cluster/` imports this package only. In reading order: `link` (the Router's side), `server` (the worker's side),
`inbox` (one-way messages), `frames` (messages on a byte stream) and `credentials` (certificates).
"""

from cluster.transport.inbox import InboxAddress, Outbox, open_inbox
from cluster.transport.link import (
    ConnectionLostError,
    Connector,
    DeadlineError,
    Endpoint,
    Link,
    OnBreak,
    PeerGoneError,
    TransportError,
)
from cluster.transport.server import Listener, Server

__all__ = [
    "ConnectionLostError",
    "Connector",
    "DeadlineError",
    "Endpoint",
    "InboxAddress",
    "Link",
    "Listener",
    "OnBreak",
    "Outbox",
    "PeerGoneError",
    "Server",
    "TransportError",
    "open_inbox",
]
