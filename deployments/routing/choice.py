"""QueueDepthRouter: which Router Serve sends a request to, by the loads that this process knows."""

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.routing import loads
from deployments.wire import Generation


class QueueDepthRouter(RequestRouter):
    """Chooses a Router that holds the prompt's prefix, or else has the shorter queue; queues count sequences."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return two replicas, the better first; Serve uses the second if the first cannot be reached."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        requests = _requests(pending_request)
        refusing = {name for request in requests for name in request.refused_by}
        prefixes = next((request.prefixes for request in requests if not request.has_moved), ())
        names = loads.LOADS.ranked([name for name in replicas if name not in refusing] or [*replicas], prefixes)
        if names:
            self._assign(
                pending_request, names[0]
            )  # at once: Serve may choose for other requests before it sends this request
        return [[replicas[name]] for name in names]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        self._assign(pending_request, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        loads.LOADS.set_routers(replica.replica_id.unique_id for replica in replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop a dead replica before Serve's controller does."""
        loads.LOADS.set_routers(loads.LOADS.routers - {replica_id.unique_id})
        super().on_replica_actor_died(replica_id)

    @staticmethod
    def _assign(pending_request: PendingRequest | None, router: str) -> None:
        for request in _requests(pending_request):
            loads.LOADS.assign(request.request_id, router)


def _requests(pending_request: PendingRequest | None) -> list[Generation]:
    """Return the request in a call's arguments; calls of `describe` have none."""
    arguments = [] if pending_request is None else pending_request.args
    return [argument for argument in arguments if isinstance(argument, Generation)]
