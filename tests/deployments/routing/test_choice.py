"""Which Router Serve sends a request to."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest

from deployments.routing import loads as router_loads
from deployments.routing.choice import QueueDepthRouter
from deployments.routing.loads import RouterLoads
from deployments.wire import Report
from tests.deployments.fakes import generation

PREFIXES = (1, 2, 3, 4, 5, 6)


@pytest.fixture
def loads() -> RouterLoads:
    loads = RouterLoads()
    loads.set_routers(["a", "b"])
    return loads


@dataclass
class Replica:
    replica_id: ReplicaID


def replica(name: str) -> Any:
    return Replica(ReplicaID(name, DeploymentID("Router")))


def pending(*args: object) -> PendingRequest:
    return PendingRequest(args=list(args), kwargs={}, metadata=RequestMetadata("request", "internal"))


@pytest.fixture
def router(loads: RouterLoads, monkeypatch: pytest.MonkeyPatch) -> Any:
    loads.note(Report("a", None, 5))
    monkeypatch.setattr(router_loads, "LOADS", loads)
    # As Serve gets it: from its pickle, which must not hold a copy of what is known of the Routers.
    cls = RequestRouterConfig(request_router_class=QueueDepthRouter).get_request_router_class()  # type: ignore[arg-type]
    return object.__new__(cls)


async def test_the_router_with_fewer_requests_is_first_and_counts_at_once(loads: RouterLoads, router: Any) -> None:
    request = generation(n=7)
    loads.begin(request.request_id, 7)
    replicas = [replica("a"), replica("b")]
    assert await router.choose_replicas(replicas, pending(request)) == [[replica("b")], [replica("a")]]
    assert loads.depth("b") == 7
    assert await router.choose_replicas(replicas, pending()) == [[replica("a")], [replica("b")]]
    router.on_request_routed(pending(request, "an address"), replica("a").replica_id, None)
    assert [loads.depth(name) for name in "ab"] == [12, 0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "ba"),
        ({"refused_by": frozenset("b")}, "a"),
        ({"refused_by": frozenset("ab")}, "ba"),
        ({"prefixes": PREFIXES}, "ab"),
        ({"prefixes": PREFIXES, "has_moved": True}, "ba"),
        ({"prefixes": PREFIXES, "refused_by": frozenset("a")}, "b"),
    ],
)
async def test_a_request_goes_to_its_prefix_unless_it_has_left_it_or_was_refused(
    loads: RouterLoads, router: Any, fields: dict[str, Any], expected: str
) -> None:
    loads.note(Report("a", None, 5, prefixes=PREFIXES))
    request = replace(generation(), **fields)
    loads.begin(request.request_id, 1)
    chosen = await router.choose_replicas([replica("a"), replica("b")], pending(request))
    assert chosen == [[replica(name)] for name in expected]
    assert await router.choose_replicas([], None) == []
