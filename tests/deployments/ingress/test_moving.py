"""When waiting requests leave a Router for another, and how many."""

import asyncio
import logging

import pytest

from deployments.ingress import moving
from deployments.ingress.moving import Move, Mover, choose_leaving, plan_move
from deployments.router.generation import QueueReport
from engine.errors import CapacityError


def report(name: str, depth: int, movable: int = 0, mine: int | None = None, *, can_serve: bool = True) -> QueueReport:
    return QueueReport(name, depth, movable, movable if mine is None else mine, can_serve)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], None),
        ([report("a", 12, 8)], None),
        ([report("a", 12, 8), report("b", 0)], Move("a", 6)),
        ([report("a", 12, 3), report("b", 0)], Move("a", 3)),
        ([report("a", 12, 8), report("b", 9)], None),
        ([report("a", 12), report("b", 0)], None),
        ([report("a", 12, 8), report("b", 0, can_serve=False)], None),
        ([report("a", 12, 8, can_serve=False), report("b", 2)], Move("a", 5)),
        ([report("a", 20, 9), report("b", 30, 9), report("c", 4)], Move("b", 9)),
        ([report("a", 20, 9), report("b", 30, 9, mine=0), report("c", 4)], Move("a", 8)),
        ([report("a", 40, 20, mine=5), report("b", 0)], Move("a", 5)),
        ([report("a", 24, 20, mine=5), report("b", 0)], Move("a", 3)),
        ([report("a", 24, 20, mine=1), report("b", 0)], Move("a", 1)),
    ],
    ids=[
        "no Router",
        "one Router",
        "a new Router: half the difference",
        "no more than wait",
        "nearly even",
        "nothing waits",
        "a Router that recovers takes nothing",
        "a Router that recovers gives",
        "from the deepest",
        "from the deepest with requests of this Ingress",
        "no more than are its own",
        "its share",
        "at least one",
    ],
)
def test_what_is_moved(reports: list[QueueReport], expected: Move | None) -> None:
    assert plan_move(reports) == expected


@pytest.mark.parametrize("depths", [[100, 0], [100, 3, 0], [7, 6, 5, 0], [1, 1, 40]], ids=str)
def test_moves_come_to_an_end(depths: list[int]) -> None:
    """Nothing moves to and fro: each move lessens the greatest difference, until the queues are about even."""
    for _ in range(20):
        move = plan_move([report(str(index), depth, depth) for index, depth in enumerate(depths)])
        if move is None:
            break
        shallowest = depths.index(min(depths))
        before = sum(depth**2 for depth in depths)
        depths[int(move.router_id)] -= move.limit
        depths[shallowest] += move.limit
        assert sum(depth**2 for depth in depths) < before
    assert max(depths) - min(depths) < moving.SMALLEST_DIFFERENCE


def test_load_that_flaps_below_the_smallest_difference_moves_nothing() -> None:
    for depth in range(40):
        for difference in range(moving.SMALLEST_DIFFERENCE):
            assert plan_move([report("a", depth + difference, depth), report("b", depth, depth)]) is None


@pytest.mark.parametrize(
    ("stopped", "depths", "expected"),
    [
        ([], [0], ""),
        ([(9, "abc")], [], ""),
        ([(9, "abc")], [0], "abc"),
        ([(9, "abc")], [20, 8], "abc"),
        ([(9, "abc")], [9, 12], ""),
        ([(9, "abc")], [18, 20], ""),
        ([(30, "abc")], [18], "ab"),
        ([(30, "abc")], [25, 19], "a"),
        ([(9, "abc"), (3, "d")], [5], "abc"),
        ([(9, "abc"), (6, "d")], [5], "abcd"),
    ],
    ids=[
        "no Router was stopped",
        "no other Router runs",
        "all of them leave",
        "if any Router has less to do",
        "not if they would wait longer",
        "not to a longer queue",
        "no more than fit",
        "no more than fit where there is room",
        "from the Router that has more to do",
        "from both",
    ],
)
def test_who_leaves_a_router_that_was_stopped(stopped: list[tuple[int, str]], depths: list[int], expected: str) -> None:
    assert choose_leaving(stopped, depths, capacity=20) == [*expected]


class Routers:
    """Routers that report what is given, and note what is withdrawn; the last report holds for ever."""

    def __init__(self, *reports: list[QueueReport] | Exception) -> None:
        self._reports = [*reports]
        self.withdrawn: list[tuple[str, int]] = []
        self.num_asked = self.num_left = 0
        self.has_withdrawn = asyncio.Event()

    async def report_queues(self) -> list[QueueReport]:
        self.num_asked += 1
        answer = self._reports.pop(0) if len(self._reports) > 1 else self._reports[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def leave_stopped(self) -> int:
        self.num_left += 1
        return self.num_left % 2

    async def withdraw(self, router_id: str, limit: int) -> int:
        self.withdrawn.append((router_id, limit))
        self.has_withdrawn.set()
        return limit


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "CHECK_PERIOD_S", 0.0)


async def test_routers_are_asked_only_while_a_request_waits() -> None:
    routers = Routers([report("a", 12, 8), report("b", 0)])
    answers = [False, False, True]
    mover = Mover(routers, lambda _: answers.pop(0) if answers else False)
    await routers.has_withdrawn.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (routers.num_asked, routers.num_left, routers.withdrawn) == (1, 1, [("a", 6)])
    assert not mover._task.done()


async def test_it_goes_on_when_no_router_answers() -> None:
    routers = Routers(CapacityError("no Router is running"), [report("a", 12, 8), report("b", 0)])
    mover = Mover(routers, lambda _: True)
    await routers.has_withdrawn.wait()
    assert routers.withdrawn[0] == ("a", 6)
    assert not mover._task.done()


async def test_a_bug_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    mover = Mover(Routers(ValueError("bug")), lambda _: True)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        await asyncio.wait([mover._task])
        await asyncio.sleep(0)
    assert "waiting requests are not moved any more" in caplog.text
