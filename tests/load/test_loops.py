"""An open loop does not wait for answers; a closed loop does."""

import asyncio

import pytest

from tests.load.client import Clock
from tests.load.loops import LoopLag, closed_loop, open_loop
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


async def test_lag_is_noticed() -> None:
    lag = LoopLag()
    watch = asyncio.create_task(lag.watch())
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0.01)
    end_s = loop.time() + 0.2
    while loop.time() < end_s:  # keeps the event loop busy
        pass
    await asyncio.sleep(0)
    while not lag.lags_s:
        await asyncio.sleep(0)
    watch.cancel()
    assert lag.lags_s[0] > 0.1
