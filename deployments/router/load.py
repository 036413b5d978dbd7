"""Load: what a Router tells each Ingress about its queue, several times a second."""

import msgspec

REPORT_INTERVAL_S = 0.1
HEARTBEAT_S = 1.0
"""How often a load is reported although it has not changed: an Ingress does not believe old ones."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """The queue of one Router; an array on the wire, which tells it from outputs.

    Attributes:
        router: the replica's id in Serve.
        num_requests: running and waiting, each choice of a request by itself.
        num_yours: how many of these came from the Ingress that this is sent to.
        drain_rate: requests finished per second.
        num_ingresses: Ingress replicas that are connected to this Router.
        leaving: ids of your requests that wait here although the replica has been stopped; another Router may have
            them.
    """

    router: str
    num_requests: int
    num_yours: int
    drain_rate: float
    num_ingresses: int
    leaving: tuple[str, ...] = ()
