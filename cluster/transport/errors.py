"""What a call to a worker raises when it gets no reply."""

from engine.errors import PacelineError


class TransportError(PacelineError):
    """A call that got no reply; base of the three reasons."""


class DeadlineError(TransportError):
    """The worker did not answer in time."""


class ConnectionLostError(TransportError):
    """The connection broke before the reply came; the link is connecting again."""


class PeerGoneError(TransportError):
    """The worker is dead, or the link was closed; no later call can succeed."""
