"""From the blocks of the target's rank 0 to the draft worker's store, over real sockets."""

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch

from cluster.protocol.messages import Failure, Features, PrefixMissing, decode_request, encode
from cluster.transport import Connector
from cluster.workers import features as features_module
from cluster.workers.features import FeatureSource, receiver
from engine.drafting.model.feature_store import FeatureStore
from engine.protocols import Verdict, VerifyRow, chain
from tests.cluster.fakes import SumVerifier, verify_row
from tests.cluster.wire import NODE_ID, ping, serving
from tests.waiting import wait_for

BLOCK_SIZE, STATE_SIZE = 4, 3


class StatesVerifier(SumVerifier):
    """Accepts `num_accepted` draft tokens; the state of a token is its slot, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        slots = torch.arange(64 * STATE_SIZE, dtype=torch.bfloat16).view(-1, BLOCK_SIZE, STATE_SIZE)
        self.kv = SimpleNamespace(
            states=slots, slot=lambda blocks, place: blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
        )
        self.num_accepted = 0

    async def verify(self, rows: Sequence[VerifyRow], *, decides: bool = True) -> list[Verdict]:
        path = list(range(self.num_accepted))
        return [Verdict([7] * (1 + len(path)), path) if row.reaches_tip else Verdict() for row in rows]


def row(request_id: str, length: int, *, start: int = 0, blocks: Sequence[int] = (2, 5), draft: int = 0) -> VerifyRow:
    """A row that computes all tokens from `start` to before `length`; its prompt may be longer."""
    made = verify_row(request_id, [1] * length, block_ids=blocks, draft=[7] * draft)
    return VerifyRow(made.request, start, length - start, made.block_ids, chain([7] * draft))


class Rig:
    """Rank 0, and the draft worker's store."""

    def __init__(self) -> None:
        self.verifier, self.store = StatesVerifier(), FeatureStore(0.0)
        self.source = FeatureSource(self.verifier, Connector(NODE_ID), version=3)

    async def round(self, *rows: VerifyRow) -> None:
        await self.source.verify(rows)
        await wait_for(lambda: self.source.has_room)
        assert not self.source.work()
        await wait_for(lambda: all(call.done() for call in self.source._under_way))

    def taken(self, request_id: str) -> list[int]:
        """The slots whose states have arrived for a request; they are taken from the store."""
        _, rows = self.store.take(f"1/{request_id}", 1000)
        assert self.store.dtype in ("", "bfloat16")
        states = torch.frombuffer(rows, dtype=torch.bfloat16) if rows else torch.empty(0)
        return [int(state) // STATE_SIZE for state in states.view(-1, STATE_SIZE)[:, 0]]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    with serving(rig.source.identity, receiver(rig.store, "1/")) as server:
        rig.source.connect(server.endpoint)
        yield rig


async def test_the_features_of_committed_tokens_arrive_each_once_accepted_drafts_included(rig):
    await rig.round(row("a", 6))
    assert rig.taken("a") == [8, 9, 10, 11, 20, 21]
    rig.verifier.num_accepted = 1
    await rig.round(row("a", 7, start=6, draft=3))
    assert rig.taken("a") == [22, 23]
    assert rig.store.counts["bytes"] == 8 * STATE_SIZE * 2


async def test_a_round_brings_a_bounded_part_of_a_long_context_and_says_so(rig, monkeypatch):
    monkeypatch.setattr(features_module, "_MAX_BYTES", 4 * STATE_SIZE * 2)
    await rig.round(row("a", 6), row("b", 2, blocks=[0]))
    assert not rig.store.wait("1/a", 6)
    assert rig.store.counts["waited"] == 0
    assert rig.taken("b") == [0, 1]  # which the long one does not hold up
    assert rig.taken("a") == [8, 9]
    await rig.round(row("a", 7, start=6), row("b", 3, start=2, blocks=[0]))
    assert rig.taken("b") == [2]
    assert rig.taken("a") == [10, 11, 20]


async def test_what_the_draft_worker_has_forgotten_is_sent_again_one_round_later(rig):
    await rig.round(row("a", 6))
    rig.store.forget("1/a")
    await rig.round(row("a", 7, start=6))
    assert rig.taken("a") == []
    await rig.round(row("a", 8, start=7))
    assert rig.taken("a") == [8, 9, 10, 11, 20, 21, 22, 23]


async def test_a_request_that_has_ended_is_forgotten_on_both_sides(rig):
    await rig.round(row("a", 6))
    rig.source.release("a")
    assert rig.verifier.released == ["a"]
    await rig.round(row("b", 2))
    assert rig.taken("a") == []
    assert "a" not in rig.source.num_sent
    await rig.round(row("a", 2))  # another request of that name
    assert rig.taken("a") == [8, 9]


async def test_the_target_never_waits_and_sends_later_what_was_left_out(rig):
    """The draft worker does not answer, as if it was stopped."""
    may_answer, put = threading.Event(), rig.store.put
    rig.store.put = lambda *arguments, **options: may_answer.wait(10) and put(*arguments, **options)
    await wait_for(lambda: rig.source.has_room)
    for length in range(1, 9):
        await rig.source.verify([row("a", length, start=length - 1)])
        rig.source.work()
    assert not rig.source.has_room
    assert rig.source.num_sent == {"a": 4}
    may_answer.set()
    await rig.round(row("a", 8, start=7))
    assert rig.taken("a") == [8, 9, 10, 11, 20, 21, 22, 23]


def test_a_message_is_read_where_it_lies_and_another_is_refused():
    rows = memoryview(bytes(range(12)))
    [entry] = decode_request(encode(_features(rows))).rows
    assert (entry.request_id, entry.offset, entry.end, bytes(entry.rows)) == ("a", 5, 9, bytes(rows))
    answer = receiver(FeatureStore(), "1/")
    assert isinstance(answer(ping(1)), Failure)
    reply = answer(_features(rows))
    assert isinstance(reply, PrefixMissing)
    assert (reply.round, reply.version, reply.request_ids) == (4, 2, ["a"])


def _features(rows: memoryview) -> Features:
    return Features(4, 2, 1.0, [], "uint8", 3, [features_module.FeatureRows("a", 5, 9, rows)])
