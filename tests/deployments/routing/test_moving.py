"""When waiting requests leave a Router for another, and how many."""

from typing import Any

import pytest

from deployments.routing import moving
from deployments.routing.moving import Queue, plan_moves

CAPACITY = 20


def queue(depth: int, movable: str = "", **settings: Any) -> Queue:
    return Queue(depth, dict.fromkeys(movable, 1), **settings)


def stopped(depth: int, movable: str = "") -> Queue:
    return queue(depth, movable, is_stopped=True)


MOVES = {
    "no Router": ([], ""),
    "one Router": ([queue(12, "abcdefgh")], ""),
    "a new Router: half the difference": ([queue(12, "abcdefgh"), queue(0)], "abcdef"),
    "no more than wait": ([queue(12, "abc"), queue(0)], "abc"),
    "nearly even": ([queue(12, "abc"), queue(9)], ""),
    "nothing waits": ([queue(12), queue(0)], ""),
    "a Router that recovers takes nothing": ([queue(12, "abc"), queue(0, can_serve=False)], ""),
    "a Router that recovers gives": ([queue(12, "abcdefgh", can_serve=False), queue(2)], "abcde"),
    "from the deepest": ([queue(20, "ab"), queue(30, "cd"), queue(4)], "cd"),
    "from the deepest with requests of this Ingress": ([queue(20, "ab"), queue(30), queue(4)], "ab"),
    "its share": ([queue(24, "abcdefgh", share=0.25), queue(0)], "abc"),
    "at least one": ([queue(24, "a", share=0.01), queue(0)], "a"),
    "stopped: no other Router": ([stopped(9, "abc")], ""),
    "stopped: no other Router runs": ([stopped(9, "abc"), stopped(1)], ""),
    "stopped: the other Router recovers": ([stopped(9, "abc"), queue(0, can_serve=False)], ""),
    "stopped: all of them leave": ([stopped(9, "abc"), queue(0)], "abc"),
    "stopped: even if the difference is small": ([stopped(9, "abc"), queue(8)], "abc"),
    "stopped: not if they would wait as long": ([stopped(9, "abc"), queue(9)], ""),
    "stopped: no more than fit": ([stopped(30, "abc"), queue(18)], "ab"),
    "stopped: no more than fit where there is room": ([stopped(30, "abc"), queue(25), queue(19)], "a"),
    "stopped: from the Router that has more to do": ([stopped(9, "abc"), stopped(3, "d"), queue(5)], "abc"),
    "stopped: two share the room": ([stopped(30, "abc"), stopped(30, "d"), queue(17)], "abc"),
    "both": ([stopped(9, "ab"), queue(8, "cdefgh"), queue(0)], "abcdef"),
}


@pytest.mark.parametrize("case", MOVES)
def test_requests_of_one_sequence(case: str) -> None:
    queues, expected = MOVES[case]
    assert plan_moves(queues, CAPACITY) == [*expected]


def test_requests_move_whole_or_not_at_all() -> None:
    full = Queue(12, {"c": 3, "b": 4, "a": 3})
    assert plan_moves([full, queue(0)], CAPACITY) == ["c", "a"]


@pytest.mark.parametrize("depths", [[100, 0], [100, 3, 0], [7, 6, 5, 0], [1, 1, 40]], ids=str)
@pytest.mark.parametrize("num_ingresses", [1, 3])
def test_moves_come_to_an_end(depths: list[int], num_ingresses: int) -> None:
    """Nothing moves to and fro: the differences only become smaller, whether one Ingress plans or several at once."""
    depths = [*depths]
    for _ in range(30):
        moves = [0] * len(depths)
        for number in range(num_ingresses):
            mine = [depth // num_ingresses + (number < depth % num_ingresses) for depth in depths]
            queues = [
                Queue(depth, {f"{router}-{index}": 1 for index in range(own)}, own / max(1, depth))
                for router, (depth, own) in enumerate(zip(depths, mine, strict=True))
            ]
            for request_id in plan_moves(queues, 1000):
                moves[int(request_id.partition("-")[0])] += 1
        if not any(moves):
            break
        shallowest = depths.index(min(depths))
        before = sum(depth**2 for depth in depths)
        depths = [depth - moved for depth, moved in zip(depths, moves, strict=True)]
        depths[shallowest] += sum(moves)
        assert sum(depth**2 for depth in depths) <= before
    assert max(depths) - min(depths) < moving.SMALLEST_DIFFERENCE
