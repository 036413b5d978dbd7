"""Carries requests from the Router to its workers and replies back; the rest of `cluster/` imports this package only.

A worker calls `listen` and gets a `Server` (`endpoint`, `serve`, `close`). The Router's `Connector` turns that endpoint
into a `Link` (`call`, `post`, `close`). Behind them are a Unix socket between processes of one node, and mutual TLS
between nodes.

In reading order: `protocol` (the two roles), `errors`, `endpoint` (where a worker listens), `connector` (the Router's
side: identity and links), `message_link` (matching replies to calls), `channel` (a link over sockets), `server` (the
worker's side), `listener` (accepting the Router's connection), `credentials` (certificates), `frames` (messages on a
byte stream).

Tokens go one way, from the `Outbox` of each Router (`outbox`) to the `Inbox` of an Ingress (`inbox`).
"""

from cluster.transport.connector import Connector
from cluster.transport.endpoint import Endpoint
from cluster.transport.errors import ConnectionLostError, DeadlineError, PeerGoneError, TransportError
from cluster.transport.inbox import Inbox, InboxAddress
from cluster.transport.outbox import Outbox
from cluster.transport.protocol import Answer, Link, OnBreak, Server
from cluster.transport.server import listen

__all__ = [
    "Answer",
    "ConnectionLostError",
    "Connector",
    "DeadlineError",
    "Endpoint",
    "Inbox",
    "InboxAddress",
    "Link",
    "OnBreak",
    "Outbox",
    "PeerGoneError",
    "Server",
    "TransportError",
    "listen",
]
