"""Answers are sorted by what became of them; a difference, an error or a hang is a problem."""

import asyncio

import pytest

from tests.faults import load as load_module
from tests.faults.load import POOL, Load
from tests.faults.streams import Received


def answer(text="a", **fields):
    return Received(texts={0: text}, **{"has_ended": True, **fields})


@pytest.fixture
def load():
    return Load(None, [answer() for _ in POOL])


@pytest.mark.parametrize(
    ("received", "outcome", "is_problem"),
    [
        (answer(), "same", False),
        (answer("b"), "different", True),
        (answer(has_ended=False), "failed", True),
        (answer(error="lost", code="unavailable"), "failed", True),
        (answer(error="full", code="queue_full"), "refused", False),
    ],
)
async def test_an_answer_is_what_was_received(load, monkeypatch, received, outcome, is_problem):
    async def receive(*_, **__):
        return received

    monkeypatch.setattr(load_module, "receive", receive)
    await load.send(0, is_stream=True)
    assert load.outcomes == {outcome: 1}
    assert bool(load.problems) == is_problem


async def test_an_answer_that_never_comes_is_a_problem_unless_the_client_gave_up(load, monkeypatch):
    async def receive(*_, **__):
        await asyncio.Event().wait()

    monkeypatch.setattr(load_module, "receive", receive)
    monkeypatch.setattr(load_module, "HANG_S", 0.01)
    await load.send(0, is_stream=False, patience_s=0.01)
    assert load.problems == []
    await load.send(0, is_stream=False)
    assert load.outcomes == {"aborted": 1, "hung": 1}
    assert len(load.problems) == 1
