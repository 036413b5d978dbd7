"""Connector: makes the Router's links to its workers."""

from cluster.transport.channel import Channel
from cluster.transport.credentials import make_credentials
from cluster.transport.endpoint import Endpoint
from cluster.transport.protocol import Link, OnBreak


class Connector:
    """Connects one process, the Router, to workers that accept connections from it alone.

    Attributes:
        identity: what a worker needs to recognise this process; public, so it may travel through Ray.
    """

    def __init__(self, node_id: str) -> None:
        """Make a new identity, which ends with this process.

        Args:
            node_id: Ray's id of the node this process runs on.
        """
        self._node_id = node_id
        self._credentials = make_credentials()
        self.identity = self._credentials.certificate

    def connect(self, endpoint: Endpoint, *, version: int, on_break: OnBreak | None = None) -> Link:
        """Return a link to a worker; it connects in the background."""
        is_same_node = endpoint.node_id == self._node_id
        return Channel(endpoint, self._credentials, is_same_node=is_same_node, version=version, on_break=on_break)
