"""What an Ingress knows of the Routers: their reports, and its own requests since."""

import random
from collections import Counter

import pytest

from deployments.ingress.router_loads import BELIEVED_S, RouterLoads
from deployments.router.load import Load

CAPACITY = 8


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loads(clock: Clock) -> RouterLoads:
    loads = RouterLoads(clock)
    loads.set_routers(["a", "b"])
    return loads


def send(loads: RouterLoads, request_id: str, router: str, num_sequences: int = 1) -> None:
    loads.begin(request_id, num_sequences)
    loads.assign(request_id, router)


def test_the_depth_is_the_report_of_the_others_and_the_own_requests_as_they_are(loads: RouterLoads) -> None:
    send(loads, "1", "a")
    assert [loads.depth(router) for router in "ab"] == [1, 0]
    loads.report(Load("a", 5, 1, 2.0, 1))
    send(loads, "2", "a", num_sequences=3)
    assert loads.depth("a") == 4 + 4
    loads.end("1")
    assert loads.depth("a") == 4 + 3


def test_a_request_counts_where_it_was_sent_last_and_not_after_its_end(loads: RouterLoads) -> None:
    send(loads, "1", "a", num_sequences=2)
    loads.assign("1", "b")
    assert [loads.depth(router) for router in "ab"] == [0, 2]
    loads.end("1")
    loads.assign("1", "a")
    assert [loads.depth(router) for router in "ab"] == [0, 0]


def test_the_shorter_queue_of_two_comes_first(loads: RouterLoads) -> None:
    loads.report(Load("a", 5, 0, 2.0, 1))
    loads.report(Load("b", 4, 0, 2.0, 1))
    assert loads.ranked(["a", "b"]) == ["b", "a"]
    assert loads.ranked(["a"]) == ["a"]
    assert loads.ranked([]) == []


def test_requests_spread_before_any_report_comes_back(loads: RouterLoads) -> None:
    random.seed(1)
    routers = [f"router {number}" for number in range(8)]
    loads.set_routers(routers)
    for number in range(800):
        send(loads, str(number), loads.ranked(routers)[0])
    depths = Counter({router: loads.depth(router) for router in routers})
    assert max(depths.values()) - min(depths.values()) <= 6


def test_two_of_equal_depth_are_chosen_alike_often(loads: RouterLoads) -> None:
    random.seed(2)
    first = Counter(loads.ranked(["a", "b", "c"])[0] for _ in range(3000))
    assert all(850 < count < 1150 for count in first.values())


def test_one_ingress_may_use_all_the_room(loads: RouterLoads) -> None:
    assert loads.room(CAPACITY) == 16
    for number in range(15):
        send(loads, str(number), "a")
    loads.begin("not sent yet", 1)
    assert loads.room(CAPACITY) == 0
    loads.report(Load("a", 6, 6, 2.0, 1))  # the others are still on their way
    assert loads.room(CAPACITY) == 0
    loads.end("0")
    assert loads.room(CAPACITY) == 1


def test_each_ingress_takes_its_share_of_the_room_that_was_reported(loads: RouterLoads) -> None:
    for number in range(8):
        send(loads, str(number), "a")
    loads.report(Load("a", 8, 8, 2.0, 1))
    loads.report(Load("b", 2, 0, 2.0, 2))
    assert loads.room(CAPACITY) == (16 - 10) / 2
    loads.report(Load("b", 2, 0, 2.0, 1))
    assert loads.room(CAPACITY) == 16 - 10, "the other one has ended"


def test_old_reports_are_not_believed(loads: RouterLoads, clock: Clock) -> None:
    loads.report(Load("a", 8, 0, 2.0, 1))
    assert loads.room(CAPACITY) == 8
    clock.now += BELIEVED_S
    assert loads.room(CAPACITY) == 16
    assert loads.depth("a") == 0


def test_only_routers_that_run_have_room(loads: RouterLoads) -> None:
    loads.report(Load("a", 8, 1, 2.0, 1))
    send(loads, "1", "a")
    loads.set_routers(["b"])
    assert loads.room(CAPACITY) == 8
    loads.set_routers(["a", "b"])
    assert loads.depth("a") == 1, "its report was forgotten"


def test_requests_may_wait_for_the_first_router_that_comes_back(loads: RouterLoads) -> None:
    loads.set_routers([])
    assert loads.room(CAPACITY) == 8


def test_clients_come_again_when_all_routers_have_drained(loads: RouterLoads) -> None:
    loads.report(Load("a", 30, 0, 2.0, 1))
    loads.report(Load("b", 30, 0, 4.0, 1))
    loads.begin("1", 30)
    assert loads.retry_after_s() == 90 / 6
    loads.set_routers([])
    assert loads.retry_after_s() == 30


def test_requests_may_leave_routers_that_were_stopped_while_those_report(loads: RouterLoads, clock: Clock) -> None:
    loads.report(Load("b", 9, 2, 2.0, 1, ("running",)))
    assert loads.leaving() == []
    send(loads, "1", "a")
    loads.set_routers(["b"])
    assert loads.leaving() == [], "it has not said who may leave"
    loads.report(Load("a", 5, 2, 2.0, 1, ("1", "2")))
    assert loads.leaving() == [(3 + 1, ("1", "2"))]
    clock.now += BELIEVED_S
    assert loads.leaving() == [], "it has ended, or hangs"
    loads.report(Load("a", 3, 0, 2.0, 1))
    assert loads.leaving() == []
