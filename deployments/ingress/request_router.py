"""QueueDepthRouter: sends each request to the Router with the shorter queue of two that are chosen at random.

Serve's own choice compares how many calls a Router has, of which one may be for many sequences.
"""

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

# The module and not its variable: Serve sends this class to the Ingress with copies of all variables that it uses.
from deployments.ingress import router_loads
from deployments.router.generation import Generation


class QueueDepthRouter(RequestRouter):
    """Chooses Routers for Serve's handle in an Ingress."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return two replicas, the better one first; Serve takes the other if that one cannot be reached."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        refusing = {name for request in _requests(pending_request) for name in request.refused_by}
        names = router_loads.LOADS.ranked([name for name in replicas if name not in refusing] or [*replicas])
        if names and pending_request is not None:
            self._assign(pending_request, names[0])  # at once: others are chosen before Serve has sent this one
        return [[replicas[name]] for name in names]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Count a request where it was sent in the end."""
        self._assign(pending_request, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that run now."""
        router_loads.LOADS.set_routers(replica.replica_id.unique_id for replica in replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop a replica that is dead, which Serve's controller finds out later."""
        router_loads.LOADS.set_routers(router_loads.LOADS.routers - {replica_id.unique_id})
        super().on_replica_actor_died(replica_id)

    @staticmethod
    def _assign(pending_request: PendingRequest, router: str) -> None:
        for request in _requests(pending_request):
            router_loads.LOADS.assign(request.request_id, router)


def _requests(pending_request: PendingRequest | None) -> list[Generation]:
    """Return what is sent to be generated: one request, or none with another call."""
    arguments = [] if pending_request is None else pending_request.args
    return [argument for argument in arguments if isinstance(argument, Generation)]
