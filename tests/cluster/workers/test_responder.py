"""What a rank of the target answers, and what ends it."""

import pytest

from cluster.protocol.messages import PrefixDelta, PrefixMissing, Verify, VerifyEntry, decode_reply, encode
from cluster.workers.responder import TargetResponder
from engine.errors import TargetError
from engine.params import SamplingParams
from engine.protocols import Draft, Verdict
from tests.cluster.fakes import SumVerifier


def verify(number, *entries, version=1):
    return Verify(number, version, 1.0, [], [VerifyEntry(entry, 0, 1, Draft()) for entry in entries])


WHOLE = PrefixDelta("a", 0, [5], 1, SamplingParams())
UNKNOWN = PrefixDelta("b", 3, [5], 1)


def test_another_version_is_not_answered():
    assert TargetResponder(SumVerifier(), rank=0, capacity=4, version=2).answer(verify(1, WHOLE)) is None


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
