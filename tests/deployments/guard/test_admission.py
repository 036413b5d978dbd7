"""Which requests an Ingress begins, and when."""

import asyncio
import itertools
from collections import Counter
from contextlib import ExitStack

import pytest

from deployments.guard.admission import Admission
from engine.errors import QueueFullError


class Routers:
    free = 2.0
    spare = 3.0

    def room(self, factor: int = 1) -> float:
        return self.free + (factor - 1) * self.spare

    def __init__(self) -> None:
        self.refused = Counter[str]()

    def retry_after_s(self) -> int:
        return 7

    def count_refusal(self, reason: str) -> None:
        self.refused[reason] += 1


def is_full(admission: Admission, owner: str = "") -> bool:
    try:
        admission.check(owner)
    except QueueFullError:
        return True
    return False


def test_requests_that_are_being_prepared_take_room() -> None:
    admission = Admission(Routers())
    with admission.preparing():
        assert not is_full(admission)
        with admission.preparing():
            assert is_full(admission)
        assert not is_full(admission)
    assert not admission._preparing


def test_a_request_that_was_submitted_is_counted_by_the_routers_only() -> None:
    admission = Admission(Routers())
    with admission.preparing("a") as first, admission.preparing("a") as second:
        assert first.owner == "a"
        admission.submitted(first)
        assert [admission.is_preparing(request) for request in (first, second, None)] == [False, True, False]
        assert not is_full(admission)
    assert not admission._preparing


@pytest.mark.parametrize(("turn_s", "num_turns"), [(0.0001, 1), (0.002, 5), (1.0, 1)])
async def test_a_busy_event_loop_holds_requests_up_but_not_for_long(turn_s: float, num_turns: int) -> None:
    turns = itertools.count()
    beginning = asyncio.create_task(Admission(Routers(), lambda: next(turns) * turn_s).turn())
    count = 0
    while not beginning.done():
        count += 1
        await asyncio.sleep(0)
    assert count - 1 == num_turns


async def test_other_tasks_run_between_the_beginnings_of_two_requests() -> None:
    admission, order = Admission(Routers()), []

    async def begin(name: str) -> None:
        await admission.turn()
        order.append(name)

    requests = [asyncio.create_task(begin(f"request {number}")) for number in range(3)]
    while not all(request.done() for request in requests):
        order.append("another route")
        await asyncio.sleep(0)
    begun = [index for index, name in enumerate(order) if name.startswith("request")]
    assert [order[index] for index in begun] == ["request 0", "request 1", "request 2"]
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(begun))


@pytest.mark.parametrize(
    ("opened", "full"),
    [
        ({"a": 3, "b": 1}, "a"),
        ({"a": 2}, "a"),  # alone it has no more room than there is
        ({"a": 4, "b": 1}, "abc"),  # nobody has more than twice the queues
    ],
)
def test_an_owner_below_the_mean_has_room_in_a_full_queue(opened: dict[str, int], full: str) -> None:
    admission = Admission(Routers())
    with ExitStack() as stack:
        for owner in "".join(owner * count for owner, count in opened.items()):
            stack.enter_context(admission.preparing(owner))
        assert [owner for owner in "abc" if is_full(admission, owner)] == [*full]
    assert admission._open == Counter()


def test_a_part_of_a_place_is_a_place_and_a_refusal_says_when_to_come_again() -> None:
    routers = Routers()
    routers.free = 0.5
    assert not is_full(Admission(routers))
    routers.free = 0.0
    with pytest.raises(QueueFullError) as error:
        Admission(routers).check()
    assert error.value.retry_after_s == 7
