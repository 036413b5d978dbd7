"""Link and Server: the two ends of a connection, as the rest of `cluster/` sees them."""

from collections.abc import Callable
from typing import Protocol

from cluster.protocol.messages import AnyReply, AnyRequest, RoundMessage
from cluster.transport.endpoint import Endpoint

Answer = Callable[[AnyRequest], AnyReply | None]
"""Computes the reply to a request; None sends no reply."""

OnBreak = Callable[[str], None]
"""Called with the reason, on the event loop, each time an established connection breaks.

Calls that wait for a reply raise ConnectionLostError then. A caller that only posts has no waiting call; the callback
tells it that requests under way are lost. It is not called after `Link.close`.
"""


class Link(Protocol):
    """The Router's end: reaches one worker, and connects again whenever the connection breaks.

    Links are made with an `OnBreak` callback, or None. A link belongs to the event loop it is made on.
    """

    @property
    def version(self) -> int:
        """The version of the group this worker belongs to; replies of any other version are dropped."""
        ...

    async def call(self, request: RoundMessage) -> AnyReply:
        """Send a request and return its reply.

        Raises:
            DeadlineError: no reply came within the request's deadline.
            ConnectionLostError: the connection broke before the reply came.
            PeerGoneError: the link was closed, before the call or during it.
            MalformedMessageError: the request is too large to be sent.
        """
        ...

    async def post(self, request: RoundMessage) -> None:
        """Send a request that gets no reply.

        Raises:
            DeadlineError: the request could not be sent within its deadline.
            ConnectionLostError: the connection broke before the request was sent.
            PeerGoneError: the link was closed, before the call or during it.
            MalformedMessageError: the request is too large to be sent.
        """
        ...

    def close(self, reason: str = "the link was closed") -> None:
        """Close the connection for good: waiting and later calls raise PeerGoneError with this reason."""
        ...


class Server(Protocol):
    """The worker's end: one client, whose requests are answered one at a time."""

    @property
    def endpoint(self) -> Endpoint:
        """Where this server is reached; send it to the Router."""
        ...

    def serve(self, answer: Answer, work: Callable[[], bool] = lambda: False) -> None:
        """Answer requests in their order until `close` is called from another thread.

        Malformed messages are dropped, and so are replies that come after their request's deadline. An exception of
        `answer` or `work` ends serving and closes the connection, so the client learns of it at once.

        Args:
            work: called repeatedly while no request waits, for as long as it returns True.
        """
        ...

    def close(self) -> None:
        """Make `serve` return after the request it is answering; a later `serve` returns at once."""
        ...
