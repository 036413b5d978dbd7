"""An open loop does not wait for answers; a closed loop does. Arrivals have the rate and burstiness asked for."""

import asyncio
import itertools
import math
from statistics import fmean, pstdev

import pytest

from tests.load.client import Clock
from tests.load.loops import arrival_times, closed_loop, open_loop
from tests.load.records import Record


class Answers:
    """Records what is sent, and answers when told to."""

    def __init__(self) -> None:
        self.due_s: dict[int, float] = {}
        self.may_answer = asyncio.Event()
        self.num_open = 0
        self.most_open = 0
        self.outcomes: dict[int, str] = {}

    async def send(self, index: int, due_s: float) -> Record:
        assert index not in self.due_s
        self.due_s[index] = due_s
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await self.may_answer.wait()
        await asyncio.sleep(0)
        self.num_open -= 1
        return Record(index, "d", due_s, due_s, outcome=self.outcomes.get(index, "ok"), retry_after_s=0.05)


async def test_an_open_loop_sends_however_many_are_unanswered() -> None:
    answers = Answers()
    loop = asyncio.create_task(open_loop(answers.send, [0.0, 0.01, 0.02, 0.03], Clock()))
    while answers.num_open < 4:
        await asyncio.sleep(0.001)
    assert not loop.done()
    answers.may_answer.set()
    await loop
    assert [answers.due_s[i] - answers.due_s[0] for i in range(4)] == pytest.approx([0.0, 0.01, 0.02, 0.03])


async def test_a_client_that_is_late_does_not_move_the_schedule() -> None:
    """Ten requests are due before the loop can send one: all are due at their own times, not at the sending."""
    answers = Answers()
    answers.may_answer.set()
    clock = Clock()
    times = [-1.0 + 0.1 * i for i in range(10)]
    await open_loop(answers.send, times, clock)
    assert all(due_s < 0.1 + clock.now_s() - 0.1 for due_s in answers.due_s.values())
    assert answers.due_s[9] - answers.due_s[0] == pytest.approx(0.9)


async def test_users_wait_for_their_answers() -> None:
    answers = Answers()
    answers.may_answer.set()
    await closed_loop(answers.send, 3, Clock(), num_requests=20)
    assert sorted(answers.due_s) == list(range(20))
    assert answers.most_open == 3


async def test_a_closed_loop_ends_after_its_duration_and_waits_for_open_requests() -> None:
    answers = Answers()
    clock = Clock()
    loop = asyncio.create_task(closed_loop(answers.send, 2, clock, duration_s=0.05))
    while clock.now_s() < 0.06:
        await asyncio.sleep(0.005)
    assert not loop.done()
    answers.may_answer.set()
    await loop
    assert len(answers.due_s) == 2


async def test_a_user_who_is_refused_waits_as_long_as_the_server_asks() -> None:
    answers = Answers()
    answers.may_answer.set()
    answers.outcomes[0] = "429"
    await closed_loop(answers.send, 1, Clock(), num_requests=2)
    assert answers.due_s[1] - answers.due_s[0] >= 0.05


COUNT = 20_000


def gaps(**arguments: float) -> list[float]:
    times = [0.0, *arrival_times(5.0, num_requests=COUNT, seed=1, **arguments)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_gaps_are_gamma_distributed(burstiness: float) -> None:
    """The coefficient of variation of a gamma distribution is 1 over the root of its shape."""
    drawn = gaps(burstiness=burstiness)
    variation = 1 / math.sqrt(burstiness)
    assert fmean(drawn) == pytest.approx(0.2, rel=5 * variation / math.sqrt(COUNT))
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(variation, rel=0.06)


def test_infinite_burstiness_is_regular() -> None:
    assert gaps(burstiness=float("inf")) == pytest.approx([0.2] * COUNT)


def test_a_seed_repeats_the_arrivals_and_a_duration_ends_them() -> None:
    times = arrival_times(5.0, duration_s=10, seed=3)
    assert times == arrival_times(5.0, duration_s=10, seed=3)
    assert times != arrival_times(5.0, duration_s=10, seed=4)
    assert times[-1] < 10
    assert arrival_times(5.0, num_requests=len(times), seed=3) == times
