"""Carries requests from the Router to its workers and replies back; the rest of `cluster/` imports this package only.

A worker's `Server` answers its clients; the Router's `Connector` turns a listener's `Endpoint` into a `Link`. Between
processes of one node they use a Unix socket, between nodes mutual TLS. All that a Router says to an Ingress goes one
way, from an `Outbox` to an inbox, by mutual TLS.

In reading order: `link` (the Router's side, and the errors of a call), `server` and `listener` (the worker's side),
`inbox` (both ends of the one-way connection), `frames` (messages on a byte stream) and `credentials` (certificates).
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
from cluster.transport.listener import Listener
from cluster.transport.server import Server

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
