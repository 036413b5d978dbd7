"""RouterState: whether one replica can take rounds now, as it tells every Ingress."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterState:
    """What a Router says of itself.

    Attributes:
        replica: Serve's name of the replica, as in the log and in `/metrics`.
        problem: why it cannot take rounds now; None if it can.
    """

    replica: str
    problem: str | None
