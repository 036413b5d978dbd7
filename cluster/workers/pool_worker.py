"""PoolWorker: holds the draft model once, and serves several Routers."""

from cluster.config import GroupConfig
from cluster.leases import Lease
from engine.config import ModelInfo


class PoolWorker:
    """One worker of the draft pool, in a process that others start, scale and watch.

    `load` and `serve` block, `serve` in a thread of its own; everything else may be called from other threads.
    """

    def __init__(self, config: GroupConfig, worker: str, *, host: str, node_id: str) -> None:
        """Make a worker with this id, which will listen on `host`, an address of the node with Ray's id `node_id`."""
        raise NotImplementedError

    def load(self) -> ModelInfo:
        """Load the draft with a cache of all memory of its device; raise ModelError if it cannot be served."""
        raise NotImplementedError

    def lease(self, identity: str, num_rows: int) -> Lease:
        """Lease this worker to the client with this identity; raise TargetError if there is no room for `num_rows`."""
        raise NotImplementedError

    @property
    def num_leases(self) -> int:
        """How many Routers use this worker."""
        raise NotImplementedError

    @property
    def utilisation(self) -> float:
        """The share of the last seconds in which this worker drafted, from 0 to 1."""
        raise NotImplementedError

    def serve(self) -> None:
        """Answer proposals until `close`; an error that ends it is raised, and ends all leases."""
        raise NotImplementedError

    def close(self) -> None:
        """End all leases, and make `serve` return."""
        raise NotImplementedError
