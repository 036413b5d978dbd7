"""What a worker answers, what it does between requests, and what ends it."""

import time

import msgspec
import pytest

from cluster.protocol.messages import (
    Failure,
    Ping,
    Pong,
    PrefixDelta,
    PrefixMissing,
    Propose,
    ProposeEntry,
    Verify,
    VerifyEntry,
    decode_reply,
    encode,
)
from cluster.workers.responder import DraftResponder, TargetResponder
from engine.control.stats import PREPARATION, RunAheadStats
from engine.errors import TargetError
from engine.params import SamplingParams
from engine.protocols import Draft, Verdict
from tests.cluster.fakes import EchoDrafter, SumVerifier


def propose(number, *entries, version=1):
    return Propose(number, version, 1.0, [], [ProposeEntry(entry, 2) for entry in entries])


def verify(number, *entries, version=1):
    return Verify(number, version, 1.0, [], [VerifyEntry(entry, 0, 1, Draft()) for entry in entries])


WHOLE = PrefixDelta("a", 0, [5], 1, SamplingParams())
UNKNOWN = PrefixDelta("b", 3, [5], 1)


def test_nothing_changes_when_a_prefix_is_missing():
    echo = EchoDrafter()
    responder = DraftResponder(echo, capacity=4, version=1)
    reply = responder.answer(propose(1, WHOLE, UNKNOWN))
    assert isinstance(reply, PrefixMissing)
    assert reply.request_ids == ["b"]
    assert echo.seen == []
    assert isinstance(responder.answer(propose(2, PrefixDelta("a", 1, [6], 1))), PrefixMissing)


def test_another_version_is_not_answered():
    assert DraftResponder(EchoDrafter(), capacity=4, version=2).answer(propose(1, WHOLE)) is None
    assert TargetResponder(SumVerifier(), rank=0, capacity=4, version=2).answer(verify(1, WHOLE)) is None


def test_a_ping_is_answered_and_a_verify_refused_by_a_draft_worker():
    responder = DraftResponder(EchoDrafter(), capacity=4, version=1)
    assert isinstance(responder.answer(Ping(1, 1, 1.0, [])), Pong)
    assert isinstance(responder.answer(verify(2, WHOLE)), Failure)


def test_all_ranks_miss_a_prefix_alike_and_stay_in_step():
    verifiers = [SumVerifier(), SumVerifier()]
    ranks = [TargetResponder(one, rank=i, capacity=4, version=1) for i, one in enumerate(verifiers)]
    assert [type(rank.answer(verify(1, UNKNOWN))) for rank in ranks] == [PrefixMissing, type(None)]
    for rank in ranks:
        rank.answer(verify(2, WHOLE))
    assert verifiers[0].seen == verifiers[1].seen != []


@pytest.mark.parametrize("number", [1, 3])
def test_a_rank_that_misses_a_round_or_gets_one_twice_ends(number):
    rank = TargetResponder(SumVerifier(), rank=1, capacity=4, version=1)
    rank.answer(verify(1, WHOLE))
    with pytest.raises(TargetError, match=f"round {number} after round 1"):
        rank.answer(verify(number, WHOLE))


class TreeVerifier(SumVerifier):
    """Accepts the second of two branches that it made itself, whatever it gets."""

    async def verify(self, rows, *, decides=True):
        return [Verdict([6, 1], [1], draft=Draft([5, 6], [-1, -1], [[5], [6]], [[1.0], [1.0]])) for _ in rows]


def test_a_verdict_brings_the_tree_that_the_target_made_but_not_what_the_router_sent():
    entries = [VerifyEntry(WHOLE, 0, 1, Draft(num_deferred=2)), VerifyEntry(WHOLE, 0, 1, Draft([5, 6], [-1, -1]))]
    responder = TargetResponder(TreeVerifier(), rank=0, capacity=4, version=1)
    reply = decode_reply(encode(responder.answer(Verify(1, 1, 1.0, [], entries))))
    assert [verdict.draft for verdict in reply.verdicts] == [Draft([5, 6], [-1, -1]), Draft()]


class AheadDrafter(EchoDrafter):
    """A drafter that has passes left to launch, and notes what the responder does."""

    def __init__(self):
        super().__init__()
        self.stats = RunAheadStats()
        self.has_time, self.is_computing, self.num_left, self.calls = True, False, 2, []
        self.runs_ahead = None

    async def propose(self, rows):
        self.calls.append(f"propose, {self.runs_ahead}")
        return await super().propose(rows)

    def advance(self):
        self.calls.append("advance")
        self.num_left -= 1
        if self.num_left < 0:
            raise RuntimeError("a pass failed")
        return self.num_left > 0

    def forget(self):
        self.calls.append("forget")


@pytest.fixture
def ahead(monkeypatch):
    drafter = AheadDrafter()
    monkeypatch.setattr(time, "sleep", lambda seconds: drafter.calls.append(f"{seconds * 1e6:.0f} us"))
    return drafter


def test_a_drafter_works_ahead_until_nothing_is_left(ahead):
    responder = DraftResponder(ahead, capacity=4, version=1)
    assert [responder.work(), responder.work()] == [True, False]
    ahead.has_time = False
    assert not responder.work()
    assert ahead.calls == ["advance", "advance"]


def test_a_drafter_knows_before_a_proposal_whether_to_work_ahead_after_it(ahead):
    responder = DraftResponder(ahead, capacity=4, version=1)
    for number, runs_ahead in enumerate([True, False, True]):
        responder.answer(msgspec.structs.replace(propose(number, WHOLE), runs_ahead=runs_ahead))
    assert ahead.calls == ["propose, True", "propose, False", "propose, True"]


def test_while_the_device_computes_the_responder_looks_for_requests_in_short_pauses(ahead):
    responder = DraftResponder(ahead, capacity=4, version=1)
    ahead.is_computing = True
    assert [responder.work(), responder.work()] == [True, True]
    ahead.is_computing = False
    responder.work()
    assert ahead.calls == ["50 us", "50 us", "advance"]


def test_the_requests_of_a_proposal_that_fails_are_forgotten():
    class Raising(EchoDrafter):
        async def propose(self, rows):
            raise MemoryError

    responder = DraftResponder(drafter := Raising(), capacity=4, version=1)
    assert isinstance(responder.answer(propose(1, WHOLE)), Failure)
    assert drafter.released == [WHOLE.request_id]


def test_a_failure_ahead_costs_only_what_was_prepared(ahead):
    responder = DraftResponder(ahead, capacity=4, version=1)
    ahead.num_left = 0
    assert not responder.work()
    assert ahead.calls == ["advance", "forget"]


def test_replies_say_what_their_rounds_should_not_have_waited_for(monkeypatch):
    monkeypatch.setitem(PREPARATION.counts, "compiled", 3)
    draft = DraftResponder(EchoDrafter(), capacity=4, version=1).answer(propose(1, WHOLE))
    target = TargetResponder(SumVerifier(), rank=0, capacity=4, version=1).answer(verify(1, WHOLE))
    for reply in (draft, target):
        assert decode_reply(encode(reply)).unprepared == PREPARATION.counts
