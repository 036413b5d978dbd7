"""stopped_replica: whether Serve has stopped the replica of this process, a Router or an Ingress.

Serve tells an application nothing of this, so the replica's own state is looked at.
"""

from typing import Any

from ray._private.worker import global_worker


def stopped_replica() -> Any | None:
    """Return Serve's object of this process's replica once Serve has stopped it: no new work, what is there ends."""
    replicas = (getattr(actor, "_replica_impl", None) for actor in global_worker.actors.values())
    return next((replica for replica in replicas if replica is not None and replica._shutting_down), None)
