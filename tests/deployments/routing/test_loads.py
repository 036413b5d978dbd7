"""How the Routers are, by their reports and by the requests of this Ingress since, and which one Serve takes."""

import random
from collections import Counter

import pytest

from deployments.routing.loads import BELIEVED_S, RouterLoads, problem_of
from deployments.routing.moving import Queue, plan_moves
from deployments.wire import Report
from tests.fakes import Clock

CAPACITY = 8


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


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
    loads.note(Report("a", None, 5, 1, 2.0, 1))
    send(loads, "2", "a", num_sequences=3)
    assert loads.depth("a") == 4 + 4
    loads.end("1")
    assert loads.depth("a") == 4 + 3


def test_finished_choices_do_not_make_a_queue_longer_or_its_share_more_than_all(loads: RouterLoads) -> None:
    """Of 64 choices one still runs. Counting all of them, a plan would move every request that waits."""
    send(loads, "long", "a", num_sequences=64)
    for number in range(20):
        send(loads, str(number), "a")
    loads.note(Report("a", None, 21, 84, 2.0, 1, tuple(map(str, range(20)))))
    loads.note(Report("b", None, 0, 0, 2.0, 1))
    queues = loads.queues(lambda _: True)
    assert [(queue.depth, queue.share) for queue in queues] == [(21, 1.0), (0, 0.0)]
    assert len(plan_moves(queues, 100)) == 10
    loads.end("long")
    assert loads.depth("a") == 0, "until the next report"


def test_a_request_counts_where_it_was_sent_last_and_not_after_its_end(loads: RouterLoads) -> None:
    send(loads, "1", "a", num_sequences=2)
    loads.assign("1", "b")
    assert [loads.depth(router) for router in "ab"] == [0, 2]
    loads.end("1")
    loads.assign("1", "a")
    assert [loads.depth(router) for router in "ab"] == [0, 0]


def test_requests_spread_before_any_report_comes_back(loads: RouterLoads) -> None:
    random.seed(1)
    routers = [f"router {number}" for number in range(8)]
    loads.set_routers(routers)
    for number in range(800):
        send(loads, str(number), loads.ranked(routers)[0])
    depths = Counter({router: loads.depth(router) for router in routers})
    assert max(depths.values()) - min(depths.values()) <= 6


def test_one_ingress_may_use_all_the_room(loads: RouterLoads) -> None:
    assert loads.room(CAPACITY) == 16
    for number in range(15):
        send(loads, str(number), "a")
    loads.begin("not sent yet", 1)
    assert loads.room(CAPACITY) == 0
    loads.note(Report("a", None, 6, 6, 2.0, 1))  # the others are still on their way
    assert loads.room(CAPACITY) == 0
    loads.end("0")
    assert loads.room(CAPACITY) == 1


def test_room_is_a_share_of_what_running_routers_reported_lately(loads: RouterLoads, clock: Clock) -> None:
    for number in range(8):
        send(loads, str(number), "a")
    loads.note(Report("a", None, 8, 8, 2.0, 1))
    loads.note(Report("b", None, 2, 0, 2.0, 2))
    assert loads.room(CAPACITY) == (16 - 10) / 2
    loads.note(Report("b", None, 2, 0, 2.0, 1))
    assert loads.room(CAPACITY) == 16 - 10, "the other one has ended"
    loads.set_routers(["b"])
    assert loads.room(CAPACITY) == 6
    clock.now += BELIEVED_S
    assert (loads.room(CAPACITY), loads.depth("b")) == (8, 0)
    loads.set_routers([])
    assert loads.room(CAPACITY) == 8, "requests may wait for the first Router that comes back"


def test_clients_come_again_when_all_routers_have_drained(loads: RouterLoads) -> None:
    loads.note(Report("a", None, 30, 0, 2.0, 1))
    loads.note(Report("b", None, 30, 0, 4.0, 1))
    loads.begin("1", 30)
    assert loads.retry_after_s() == 90 / 6
    loads.set_routers([])
    assert loads.retry_after_s() == 30


def test_a_queue_names_the_requests_that_may_move_and_their_sequences(loads: RouterLoads, clock: Clock) -> None:
    send(loads, "1", "a", num_sequences=2)
    send(loads, "2", "a")
    loads.note(Report("a", None, 12, 3, 2.0, 2, ("2", "1", "ended")))
    loads.note(Report("b", "the target is being restarted", 4, 0, 2.0, 2))
    recovering = Queue(4, {}, 0.0, can_serve=False)
    assert loads.queues(lambda _: True) == [Queue(12, {"2": 1, "1": 2}, 0.25), recovering]
    assert loads.queues(lambda request_id: request_id == "1")[0].movable == {"1": 2}
    loads.set_routers(["b"])
    assert loads.queues(lambda _: True) == [recovering], "nothing was heard of it since"
    loads.note(Report("a", None, 12, 3, 2.0, 2, ("2", "1")))
    assert loads.queues(lambda _: True)[1] == Queue(12, {"2": 1, "1": 2}, 0.25, is_stopped=True)
    clock.now += BELIEVED_S
    assert loads.queues(lambda _: True) == [], "both hang, or have ended"


def test_one_router_that_can_serve_is_enough(loads: RouterLoads, clock: Clock) -> None:
    assert (problem_of(loads.heard), loads.is_one_silent) == ("no Router is running", True)
    loads.note(Report("a", "the target is being restarted", 0, 0, 2.0, 1))
    assert (problem_of(loads.heard), loads.is_one_silent) == ("the target is being restarted", True)
    clock.now += 1.0
    loads.note(Report("b", None, 0, 0, 2.0, 1))
    assert (problem_of(loads.heard), loads.is_one_silent) == (None, False)
    assert [(heard.report.router, heard.age_s) for heard in loads.heard] == [("a", 1.0), ("b", 0.0)]
    loads.set_routers(["a"])
    loads.note(Report("b", None, 0, 0, 2.0, 1))  # it was stopped, and finishes its requests
    assert problem_of(loads.heard) == "the target is being restarted"
    clock.now += BELIEVED_S
    assert (problem_of(loads.heard), loads.is_one_silent) == ("no Router is running", True)


# Which Router holds the prompt.

PREFIXES = (1, 2, 3, 4, 5, 6)
"""96 tokens: a queue that is up to 6 sequences longer is worth them."""


def note(loads: RouterLoads, name: str, num_requests: int, prefixes: tuple[int, ...] = ()) -> None:
    loads.note(Report(name, None, num_requests, prefixes=prefixes))


def test_the_router_that_holds_the_longest_prefix_is_first(loads: RouterLoads) -> None:
    loads.set_routers("abc")
    note(loads, "a", 3, PREFIXES[:3])
    note(loads, "b", 4, PREFIXES[:5])
    note(loads, "c", 2)
    for _ in range(20):
        first, second = loads.ranked("abc", PREFIXES)
        assert first == "b" != second
    assert loads.ranked("ac", PREFIXES)[0] == "a", "b has refused the request"
    assert loads.ranked(["c"], PREFIXES) == ["c"]


def test_of_the_routers_that_hold_a_prefix_the_shorter_queue_is_first(loads: RouterLoads) -> None:
    loads.set_routers("abc")
    for name, depth in (("a", 5), ("b", 4)):
        note(loads, name, depth, PREFIXES)
    note(loads, "c", 1)
    assert all(loads.ranked("abc", PREFIXES)[0] == "b" for _ in range(20))


@pytest.mark.parametrize(("num_prefixes", "shortest", "longest"), [(1, 0, 1), (2, 3, 5), (60, 0, 6), (60, 40, 50)])
def test_a_queue_may_be_longer_by_what_the_prefix_is_worth(
    loads: RouterLoads, num_prefixes: int, shortest: int, longest: int
) -> None:
    prefixes = tuple(range(num_prefixes))
    note(loads, "b", shortest)
    note(loads, "a", longest, prefixes)
    assert loads.ranked(["a", "b"], prefixes) == ["a", "b"]
    note(loads, "a", longest + 1)
    assert loads.ranked(["a", "b"], prefixes) == ["b", "a"]
