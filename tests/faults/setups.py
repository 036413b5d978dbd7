"""open_server: the server that a fault needs, and what this machine lacks for it."""

from tests.faults.faults import Setup
from tests.faults.nodes import NodeServer
from tests.faults.redis_head import WITHOUT_REDIS, RedisServer, find_redis
from tests.faults.server import FaultServer


def why_not(setup: Setup) -> str | None:
    """Return why there can be no such server on this machine."""
    return WITHOUT_REDIS if setup == "Redis" and find_redis() is None else None


def open_server(setup: Setup, num_trials: int, **arguments: object) -> FaultServer:
    """Return a server on which faults that need this setup can be tried so often.

    Args:
        arguments: the application's.
    """
    if setup == "several nodes":
        return NodeServer(1 + num_trials, **arguments)
    if setup == "Redis":
        return RedisServer(**arguments)
    return FaultServer(tensor_parallel_size=2 if setup == "two ranks" else 1, **arguments)
