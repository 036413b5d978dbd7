"""The engine's Verifier over links that fail in every way."""

import asyncio
from dataclasses import replace

import pytest

from cluster import remote_verifier
from cluster.protocol.messages import AnyRequest, Failure, PrefixMissing, Verdicts
from cluster.remote_verifier import RemoteVerifier
from cluster.workers.responder import TargetResponder
from engine.errors import TargetError
from engine.protocols import SlotRow, Verdict
from engine.stats.preparation import PREPARATION
from tests.cluster.fakes import FakeLink, SumVerifier, answering, verify_row

VOCAB = 1000
PATIENT_S, HASTY_S = 30.0, 0.1
"""However slow this machine is, only what never comes may run out of time."""


class TargetSide:
    """A RemoteVerifier over two ranks."""

    def __init__(self) -> None:
        self.verifiers = [SumVerifier(), SumVerifier()]
        self.verifier = RemoteVerifier(vocab_size=VOCAB, timeout_s=PATIENT_S)
        self.connect(1)

    def connect(self, version: int) -> None:
        self.links = [
            FakeLink(
                TargetResponder(verifier, rank=rank, capacity=4, version=version).answer,
                version=version,
                on_break=self.verifier.disconnect,
            )
            for rank, verifier in enumerate(self.verifiers)
        ]
        self.verifier.connect(self.links)


@pytest.fixture
async def side():
    return TargetSide()


async def test_every_rank_runs_every_round_and_rank_0_decides(side):
    tokens = [1, 2, 3]
    for _ in range(4):
        [verdict] = await side.verifier.verify([verify_row("a", tokens)])
        assert verdict.token_ids == [sum(tokens) % VOCAB]
        tokens += verdict.token_ids
    assert side.verifiers[0].seen == side.verifiers[1].seen
    assert [verifier.decided for verifier in side.verifiers] == [[True] * 4, [False] * 4]
    assert side.links[0].requests == side.links[1].requests
    assert side.verifier.calls.wait_s > side.verifier.calls.compute_s > 0
    assert side.verifier.unprepared == dict(PREPARATION.counts)


async def test_every_rank_learns_the_slot_of_a_row(side):
    """A number that every rank counts by itself would be wrong after a lost round."""
    slots = [SlotRow(3, 0), SlotRow(3, 3, 2, ((64, 5), (128, 6))), None]
    for length, slot in enumerate(slots, 3):
        await side.verifier.verify([replace(verify_row("a", [1] * length), slot=slot)])
    for verifier in side.verifiers:
        assert [row.slot for (row,) in verifier.seen] == slots


async def test_a_lost_target_raises_until_it_is_connected_again(side):
    await side.verifier.verify([verify_row("a", [1, 2])])
    side.links[0].faults = ["lose reply"]
    side.verifier._timeout_s = HASTY_S
    with pytest.raises(TargetError, match="no reply to round 2"):
        await side.verifier.verify([verify_row("a", [1, 2, 3])])
    side.verifier._timeout_s = PATIENT_S
    with pytest.raises(TargetError):
        await side.verifier.verify([verify_row("a", [1, 2, 3])])
    side.connect(2)
    [verdict] = await side.verifier.verify([verify_row("a", [1, 2, 3])])
    assert verdict.token_ids == [6]


async def test_a_rank_above_0_whose_connection_breaks_ends_the_round(side):
    """It never answers, so no call of its own would tell; what was on its way to it is lost."""
    side.links[0].faults = ["lose"]
    waiting = asyncio.create_task(side.verifier.verify([verify_row("a", [1])]))
    await asyncio.sleep(0)
    side.links[1].break_connection("the worker closed the connection")
    with pytest.raises(TargetError, match="the worker closed the connection"):
        await waiting


class Clock:
    """A clock that only rounds move, and a target that takes so long for each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, side: TargetSide) -> None:
        self.now_s, self.round_s, self.side = 0.0, 0.5, side
        monkeypatch.setattr(remote_verifier.time, "perf_counter", lambda: self.now_s)
        answer = side.links[0].answer

        def slow(request: AnyRequest):
            self.now_s += self.round_s
            return answer(request)

        side.links[0].answer = slow

    async def deadlines(self, tokens: list[int], num_rounds: int) -> list[float]:
        """Decode, and return the deadline of each round."""
        for _ in range(num_rounds):
            [verdict] = await self.side.verifier.verify([verify_row("a", tokens)])
            tokens += verdict.token_ids
        return [request.deadline_s for request in self.side.links[0].requests[-num_rounds:]]


async def test_a_round_like_eight_before_it_has_a_shorter_deadline_until_the_target_starts_again(monkeypatch):
    side, tokens = TargetSide(), [1, 2, *[3] * 62]
    clock = Clock(monkeypatch, side)
    # The first round is the request's first; the eight after it are measured.
    assert await clock.deadlines(tokens, 12) == [PATIENT_S] * 9 + [pytest.approx(10.0)] * 3
    assert [request.deadline_s for request in side.links[1].requests[-3:]] == [pytest.approx(10.0)] * 3
    side.connect(2)
    clock = Clock(monkeypatch, side)
    assert await clock.deadlines(tokens, 10) == [PATIENT_S] * 9 + [pytest.approx(10.0)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: Verdicts(r.round, 1, 0.0, []), "0 verdicts for 1 rows"),
        (lambda r: Verdicts(r.round, 1, 0.0, [Verdict([VOCAB])]), "outside"),
        (lambda r: PrefixMissing(r.round, 1, 0.0, ["a"]), "PrefixMissing"),
        (lambda r: Failure(r.round, 1, 0.0, "no memory"), "no memory"),
    ],
    ids=["no row", "no token", "prefix missing twice", "failure"],
)
async def test_a_wrong_verdict_is_a_target_error(make, message):
    verifier = RemoteVerifier(vocab_size=VOCAB, timeout_s=PATIENT_S)
    verifier.connect([answering(make)])
    with pytest.raises(TargetError, match=message):
        await verifier.verify([verify_row("a", [1, 2])])
    assert not verifier.is_available


# Two rounds in flight.


def begin(side: TargetSide, *rows) -> asyncio.Task[list[Verdict]]:
    return asyncio.ensure_future(side.verifier.verify(rows))


async def test_a_round_is_sent_before_the_one_before_it_has_ended(side):
    rounds = [begin(side, verify_row("a", [1, 2])), begin(side, verify_row("b", [3, 4]), verify_row("c", [5, 6]))]
    await asyncio.sleep(0)
    assert [request.round for request in side.links[0].requests] == [1, 2]
    assert not any(each.done() for each in rounds)
    assert [[verdict.token_ids for verdict in await each] for each in rounds] == [[[3]], [[7], [11]]]


async def test_a_round_in_flight_adds_to_the_deadline_of_the_next(side):
    """The second waits for the first."""
    await asyncio.gather(*(begin(side, verify_row(name, [1, 2])) for name in "ab"))
    await begin(side, verify_row("c", [1, 2]))
    deadlines = [request.deadline_s for request in side.links[0].requests]
    assert deadlines == [PATIENT_S, 2 * PATIENT_S, PATIENT_S]
    assert side.links[1].requests == side.links[0].requests


async def test_rounds_in_flight_are_measured_from_the_end_of_the_one_before(monkeypatch):
    side, tokens = TargetSide(), {name: [1, 2, *[3] * 62] for name in "ab"}
    now_s, round_s, replies, arrive = 0.0, 0.5, [], side.links[0]._arrive
    monkeypatch.setattr(side.links[0], "_arrive", lambda *reply: replies.append(reply))
    monkeypatch.setattr(remote_verifier.time, "perf_counter", lambda: now_s)
    for _ in range(12):
        rounds = [begin(side, verify_row(name, ids)) for name, ids in tokens.items()]
        for ids, each in zip(tokens.values(), rounds, strict=True):
            while not replies:
                await asyncio.sleep(0)
            now_s += round_s
            arrive(*replies.pop(0))
            ids += (await each)[0].token_ids
    assert side.verifier.calls.wait_s == pytest.approx(now_s)
    own_s = 20 * round_s
    assert [request.deadline_s for request in side.links[0].requests[-2:]] == [own_s, 2 * own_s]


async def test_a_lost_connection_ends_both_rounds_and_neither_touches_the_ranks_that_come_next(side):
    side.links[0].faults = ["lose", "lose"]
    rounds = [begin(side, verify_row(name, [1, 2])) for name in "ab"]
    await asyncio.sleep(0)
    side.links[1].break_connection("the worker closed the connection")
    side.connect(2)
    late = begin(side, verify_row("c", [1, 2]))
    for each in rounds:
        with pytest.raises(TargetError, match="the worker closed the connection"):
            await each
    assert [verdict.token_ids for verdict in await late] == [[3]]
    assert side.verifier.is_available
    assert not side.verifier._due_s
    assert [request.round for request in side.links[0].requests] == [1]


async def test_every_rank_gets_rounds_in_the_same_order_even_if_one_has_no_room(side, monkeypatch):
    post, waits = side.links[1].post, iter([0.05, 0.0])

    async def slow(request):
        await asyncio.sleep(next(waits))
        return await post(request)

    monkeypatch.setattr(side.links[1], "post", slow)
    await asyncio.gather(begin(side, verify_row("a", [1, 2])), begin(side, verify_row("b", [1, 2])))
    for link in side.links:
        assert [request.round for request in link.requests] == [1, 2]


async def evicted(side: TargetSide) -> tuple:
    """Two rows of which the ranks have evicted the first one's prefix, and a row of another round."""
    row, other, third = (verify_row(name, [nth, 2, 3]) for nth, name in enumerate(("a", "b", "c")))
    await side.verifier.verify([row])
    for nth in range(4):
        await side.verifier.verify([verify_row(f"other {nth}", [1, 2])])
    return row, other, third


async def test_a_round_that_the_ranks_refuse_is_sent_again_after_the_one_behind_it(side):
    row, other, third = await evicted(side)
    first, second = begin(side, row, other), begin(side, third)
    assert [verdict.token_ids for verdict in await first] == [[5], [6]]
    assert [verdict.token_ids for verdict in await second] == [[7]]
    sent = [[entry.prefix.request_id for entry in request.rows] for request in side.links[0].requests[-3:]]
    assert sent == [["a", "b"], ["c"], ["a", "b"]]
    assert side.links[0].requests == side.links[1].requests


async def test_a_request_that_ends_before_its_round_is_sent_again_is_left_out(side):
    """The round that was computed meanwhile may have its blocks."""
    row, other, third = await evicted(side)
    first, second = begin(side, row, other), begin(side, third)
    await asyncio.sleep(0)
    side.verifier.release("b")
    assert [verdict.token_ids for verdict in await first] == [[5], []]
    assert [verdict.token_ids for verdict in await second] == [[7]]
    assert [entry.prefix.request_id for entry in side.links[0].requests[-1].rows] == ["a"]
    assert "b" not in side.verifier._acknowledged._lengths


async def test_a_round_whose_requests_have_all_ended_is_not_sent(side):
    row, _, third = await evicted(side)
    first, second = begin(side, row), begin(side, third)
    unsent = begin(side, verify_row("d", [1, 2]))
    side.verifier.release("d")
    await asyncio.sleep(0)
    side.verifier.release("a")
    assert await first == await unsent == [Verdict()]
    assert [verdict.token_ids for verdict in await second] == [[7]]
    assert len(side.links[0].requests) == 5 + 2
    assert [verdict.token_ids for verdict in await begin(side, verify_row("e", [1, 2]))] == [[3]]


async def test_a_request_that_ends_in_flight_is_released_once_behind_its_round(side):
    first, second = begin(side, verify_row("a", [1, 2])), begin(side, verify_row("b", [1, 2]))
    await asyncio.sleep(0)
    side.verifier.release("a")
    third = begin(side, verify_row("c", [1, 2]))
    await asyncio.gather(first, second, third)
    await begin(side, verify_row("b", [1, 2, 3]))
    assert [request.released for request in side.links[0].requests] == [[], [], ["a"], []]
    assert [verifier.released for verifier in side.verifiers] == [["a"], ["a"]]
    assert "a" not in side.verifier._acknowledged._lengths


async def test_an_id_may_be_used_again_while_the_old_request_is_in_flight(side):
    old = begin(side, verify_row("a", [1, 2, 3, 4]))
    await asyncio.sleep(0)
    side.verifier.release("a")
    tokens = [7, 8]
    row = verify_row("a", tokens)
    new, other = begin(side, row), begin(side, verify_row("b", [1, 2]))
    assert [verdict.token_ids for verdict in await new] == [[15]]
    await asyncio.gather(old, other)
    tokens.append(9)
    row.request.token_ids.append(9)
    again = replace(row, start=2)
    assert [verdict.token_ids for verdict in await begin(side, again)] == [[24]]
    assert [verifier.released for verifier in side.verifiers] == [["a"], ["a"]]
    assert side.links[0].requests[-1].rows[0].prefix.offset == 2


async def test_a_round_that_was_not_yet_sent_is_not_sent_to_other_ranks(side):
    await side.verifier._sending.acquire()
    stale = begin(side, verify_row("a", [1, 2]))
    await asyncio.sleep(0)
    side.verifier.disconnect("killed")
    side.connect(2)
    side.verifier._sending.release()
    with pytest.raises(TargetError, match="killed"):
        await stale
    assert side.links[0].requests == []
    assert [verdict.token_ids for verdict in await begin(side, verify_row("a", [1, 2]))] == [[3]]
