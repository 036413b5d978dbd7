"""Which requests may be withdrawn, and which are."""

from typing import Any

import pytest

from deployments.router import waiting
from deployments.router.stream import Stream
from deployments.router.waiting import WaitingRequests


class Queue:
    """An engine's queue, oldest first."""

    def __init__(self) -> None:
        self.unstarted_ids: list[str] = []


class Requests:
    """Waiting requests that are named by letters; sequence `a1` is the second of request `a`."""

    def __init__(self) -> None:
        self.queue = Queue()
        self.waiting = WaitingRequests(self.queue)
        self._names: dict[int, str] = {}

    def add(self, name: str, *, n: int = 1, sender: str = "me", age_s: float = 100.0, rest_s: float = 0.0) -> None:
        stream = Stream(0.0)
        stream.started -= age_s
        self._names[id(stream)] = name
        ids = [f"{name}{index}" for index in range(n)]
        self.queue.unstarted_ids += ids
        self.waiting.add(stream, ids, sender, rest_s)

    def choose(self, limit: int, sender: str = "me") -> list[tuple[str, set[str]]]:
        return [(self._names[id(stream)], set(ids)) for stream, ids in self.waiting.choose(sender, limit)]


@pytest.fixture
async def requests() -> Requests:
    return Requests()


async def test_the_newest_go_first(requests: Requests) -> None:
    for name in "abc":
        requests.add(name)
    assert requests.choose(2) == [("c", {"c0"}), ("b", {"b0"})]
    assert (requests.waiting.num_movable(), requests.waiting.num_movable("me")) == (3, 3)


async def test_requests_go_whole_or_not_at_all(requests: Requests) -> None:
    requests.add("a")
    requests.add("b", n=3)
    requests.add("c", n=2)
    assert requests.choose(4) == [("c", {"c0", "c1"}), ("a", {"a0"})]


async def test_a_request_with_a_sequence_that_has_begun_stays(requests: Requests) -> None:
    requests.add("a", n=2)
    requests.add("b")
    requests.queue.unstarted_ids.remove("a0")
    assert requests.choose(9) == [("b", {"b0"})]
    assert requests.waiting.num_movable() == 1


async def test_requests_are_known_by_their_ids() -> None:
    queue = Queue()
    requests = WaitingRequests(queue)
    for name, n in (("a", 2), ("b", 1)):
        stream = Stream(0.0)
        stream.started -= 100.0
        ids = [f"{name}-{index}" for index in range(n)]
        queue.unstarted_ids += ids
        requests.add(stream, ids, "me", 0.0)
    assert requests.movable_ids("me") == ["b", "a"]
    assert requests.movable_ids("you") == []


async def test_each_ingress_gets_its_own(requests: Requests) -> None:
    requests.add("a", n=2, sender="you")
    requests.add("b")
    assert [name for name, _ in requests.choose(9, "you")] == ["a"]
    assert (requests.waiting.num_movable(), requests.waiting.num_movable("you")) == (3, 2)


@pytest.mark.parametrize(
    ("settings", "may_go"),
    [
        ({"age_s": waiting.SHORTEST_WAIT_S - 0.5}, False),
        ({"age_s": waiting.SHORTEST_WAIT_S + 0.5}, True),
        ({"age_s": 20.0, "rest_s": 30.0}, False),
        ({"age_s": 31.0, "rest_s": 30.0}, True),
    ],
    ids=["has just come", "has waited", "has just been moved", "was moved long ago"],
)
async def test_a_request_stays_for_a_while(requests: Requests, settings: dict[str, Any], may_go: bool) -> None:
    requests.add("a", **settings)
    assert bool(requests.choose(9)) == may_go


async def test_a_request_that_has_ended_is_forgotten(requests: Requests) -> None:
    requests.add("a", n=2)
    requests.waiting.remove({"a0", "a1"})
    assert requests.choose(9) == []
