"""The engine's Drafter over a link that fails in every way."""

import asyncio
from dataclasses import replace

import pytest

from cluster.protocol.messages import Drafts, Failure, Pong, PrefixMissing, Propose
from cluster.remote_drafter import RemoteDrafter
from engine.protocols import NO_DRAFT, chain
from engine.stats.drafts import RunAheadStats
from engine.stats.preparation import PREPARATION
from tests.cluster.fakes import EchoDrafter, FakeLink, answering, echo_worker, propose_row

VOCAB = 1000


PATIENT_S, HASTY_S = 30.0, 0.1
"""However slow this machine is, only what never comes may run out of time."""


class DraftSide:
    """A RemoteDrafter, a link, and a worker that can be replaced by one that knows nothing."""

    def __init__(self, *, capacity: int = 8) -> None:
        self.echo = EchoDrafter()
        self.capacity = capacity
        self.link = FakeLink(echo_worker(self.echo, capacity=capacity, version=1))
        self.drafter = RemoteDrafter(vocab_size=VOCAB, timeout_s=PATIENT_S)
        self.failures: list[str] = []
        self.connect()

    def forget(self) -> None:
        self.link.answer = echo_worker(self.echo, capacity=self.capacity)

    async def propose(self, *rows) -> list[list[int]]:
        is_lost = self.link.faults[:1] in (["lose"], ["lose reply"], ["late"])
        self.drafter._timeout_s = HASTY_S if is_lost else PATIENT_S
        return [draft.token_ids for draft in await self.drafter.propose(rows)]

    def connect(self) -> None:
        """Use the worker, as a new lease of it does; the reason of its failure is added to `failures`."""
        self.drafter.connect(self.link, self.failures.append)


@pytest.fixture
async def side():
    return DraftSide()


async def test_every_round_reaches_the_worker(side):
    tokens = {"a": [1, 2, 3], "b": [4]}
    for i in range(5):
        rows = [propose_row(name, ids) for name, ids in tokens.items()]
        assert await side.propose(*rows) == [ids[-3:] for ids in tokens.values()]
        assert [row.request.token_ids for row in side.echo.seen[-1]] == list(tokens.values())
        tokens["a"] += [10 + i, 20 + i]
        tokens["b"] += [30 + i]
    assert not side.drafter.fallbacks
    assert side.drafter.calls.wait_s > side.drafter.calls.compute_s > 0
    assert side.drafter.unprepared == dict(PREPARATION.counts)
    assert side.drafter.calls.num_hits == side.drafter.calls.num_misses == 0


async def test_a_round_is_a_hit_if_the_drafts_of_all_its_rows_were_prepared():
    rounds = [
        (RunAheadStats(), (0, 0)),
        (RunAheadStats(hits=2), (1, 0)),
        (RunAheadStats(hits=3, misses={"token": 1}), (0, 1)),
        (RunAheadStats(hits=3, misses={"token": 1}), (0, 0)),
        (RunAheadStats(hits=3, misses={"token": 1, "stale": 2}), (0, 1)),
        (RunAheadStats(hits=1), (1, 0)),  # of another worker, which counts from 0 again
    ]
    replies = iter([stats for stats, _ in rounds])
    make = lambda request: Drafts(request.round, request.version, 0.25, [NO_DRAFT], next(replies))  # noqa: E731
    drafter = RemoteDrafter(vocab_size=VOCAB, timeout_s=PATIENT_S)
    for number, (stats, counts) in enumerate(rounds):
        if number in (0, len(rounds) - 1):
            drafter.connect(answering(make), [].append)
        before = replace(drafter.calls)
        await drafter.propose([propose_row("a", [1])])
        calls = drafter.calls.since(before)
        assert (calls.num_hits, calls.num_misses) == counts
        assert calls.compute_s == 0.25
        assert calls.wait_s > 0
        assert drafter.run_ahead == stats


async def test_no_message_is_sent_when_no_draft_tokens_are_requested(side):
    assert await side.propose(propose_row("a", [1], k=0)) == [[]]
    assert side.link.requests == []


async def test_only_a_worker_that_runs_ahead_learns_of_requests_before_they_need_drafts(side):
    for runs_ahead in (True, False, True):
        await side.propose(replace(propose_row("a", [1], k=0), runs_ahead=runs_ahead))
        await side.propose(replace(propose_row("a", [1]), runs_ahead=runs_ahead))
    sent = [(request.runs_ahead, request.rows[0].num_draft_tokens) for request in side.link.requests]
    assert sent == [(True, 0), (True, 3), (False, 3), (True, 0), (True, 3)]


async def test_a_drafter_that_forgets_is_told_again(side):
    await side.propose(propose_row("a", [1, 2, 3]), propose_row("b", [4]))
    side.forget()
    assert await side.propose(propose_row("a", [1, 2, 3, 5])) == [[2, 3, 5]]
    assert await side.propose(propose_row("a", [1, 2, 3, 5]), propose_row("b", [4, 6])) == [[2, 3, 5], [4, 6]]
    assert not side.drafter.fallbacks


@pytest.mark.parametrize("fault", ["lose", "lose reply"])
async def test_a_lost_message_costs_one_draft(side, fault):
    await side.propose(propose_row("a", [1, 2, 3]))
    side.link.faults = [fault]
    assert await side.propose(propose_row("a", [1, 2, 3, 4])) == [[]]
    assert side.drafter.fallbacks == {"timeout": 1}
    side.connect()
    assert await side.propose(propose_row("a", [1, 2, 3, 4, 5])) == [[3, 4, 5]]


async def test_a_worker_that_failed_is_not_called_until_it_is_connected_again(side):
    side.link.faults = ["lose"]
    for _ in range(5):
        assert await side.propose(propose_row("a", [1])) == [[]]
    assert side.drafter.fallbacks == {"timeout": 1, "absent": 4}
    assert side.failures == ["timeout"]
    assert await side.drafter.replies(side.link)
    side.connect()
    assert await side.propose(propose_row("a", [1])) == [[1]]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda r: PrefixMissing(r.round, 1, 0.0, ["a"]), "prefix_missing"),
        (lambda r: Failure(r.round, 1, 0.0, "no memory"), "failure"),
        (lambda r: Pong(r.round, 1, 0.0), "failure"),
        (lambda r: Drafts(r.round, 1, 0.0, [chain([VOCAB])]), "malformed"),
    ],
    ids=["prefix missing twice", "failure", "wrong kind", "no token"],
)
async def test_a_wrong_reply_becomes_an_empty_draft(make, reason):
    drafter = RemoteDrafter(vocab_size=VOCAB, timeout_s=PATIENT_S)
    drafter.connect(answering(make), [].append)
    assert await drafter.propose([propose_row("a", [1])]) == [NO_DRAFT]
    assert drafter.fallbacks == {reason: 1}


async def test_a_dead_drafter_is_absent_at_once_and_a_new_one_knows_nothing(side):
    await side.propose(propose_row("a", [1, 2]))
    side.link.faults = ["lose"]
    waiting = asyncio.create_task(side.propose(propose_row("a", [1, 2, 3])))
    await asyncio.sleep(0)
    side.drafter.disconnect()
    side.link.close()
    assert await waiting == [[]]
    assert await side.propose(propose_row("a", [1, 2, 3])) == [[]]
    assert side.drafter.fallbacks == {"absent": 2}
    side.link = FakeLink(echo_worker(side.echo, capacity=8, version=2), version=2)
    side.connect()
    assert await side.propose(propose_row("a", [1, 2, 3, 4])) == [[2, 3, 4]]
    assert len(side.link.requests) == 1


async def test_a_release_travels_until_it_is_answered_for(side):
    await side.propose(propose_row("a", [1]), propose_row("b", [1]))
    side.drafter.release("a")
    side.drafter.release("unknown")
    side.link.faults = ["lose"]
    await side.propose(propose_row("b", [1]))
    side.connect()
    await side.propose(propose_row("b", [1]))
    await side.propose(propose_row("b", [1]))
    sent = [request.released for request in side.link.requests if isinstance(request, Propose)]
    assert sent == [[], ["a"], ["a"], []]
    assert side.echo.released == ["a"]


async def test_a_request_aborted_within_a_round_is_released_with_the_next(side):
    round_under_way = asyncio.create_task(side.propose(propose_row("a", [1, 2])))
    await asyncio.sleep(0)
    side.drafter.release("a")
    await round_under_way
    await side.propose(propose_row("b", [1]))
    assert side.echo.released == ["a"]
    assert "a" not in side.drafter._acknowledged._lengths
