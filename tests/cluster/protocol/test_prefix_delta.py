"""Both sides of the delta protocol: what a worker holds is always a prefix that the Router committed."""

import random
from dataclasses import replace

import pytest

from cluster.protocol.messages import PrefixDelta
from cluster.protocol.prefix_delta import Acknowledged, PrefixTable
from engine.blocks.block_pool import block_table
from engine.params import SamplingParams
from engine.protocols import ProposeRow, Request
from tests.cluster.fakes import propose_row, verify_row


def whole(request_id, token_ids, block_ids=()):
    return PrefixDelta(request_id, 0, list(token_ids), 1, SamplingParams(), 0, list(block_ids))


def table_of(*deltas, capacity=4):
    """Return a table that holds these prefixes, and the ids that it has forgotten so far."""
    forgotten = []
    table = PrefixTable(capacity, forgotten.append)
    assert table.update([], deltas) == []
    return table, forgotten


def test_a_whole_prefix_becomes_the_request_that_the_router_has():
    """The prompt's length decides what penalties and grammars count as output."""
    params = SamplingParams(seed=5, presence_penalty=1.0)
    table, _ = table_of(PrefixDelta("a", 0, [1, 2, 3], 2, params, 0, [7]))
    for _ in range(2):  # a repeated delta changes nothing
        assert table.update([], [PrefixDelta("a", 3, [4, 5], 2, block_offset=1)]) == []
        assert table["a"].request == Request("a", [1, 2, 3, 4, 5], 2, params)
        assert list(table["a"].block_ids) == [7]


def test_a_lower_offset_rolls_back():
    table, _ = table_of(whole("a", [1, 2, 3, 4, 5], [7, 8]))
    table.update([], [PrefixDelta("a", 2, [9], 1, None, 1, [6])])
    assert table["a"].request.token_ids == [1, 2, 9]
    assert list(table["a"].block_ids) == [7, 6]


@pytest.mark.parametrize(
    "delta",
    [
        PrefixDelta("b", 1, [4], 1),
        PrefixDelta("a", 4, [4], 1),
        PrefixDelta("a", 3, [4], 1, None, 3),
        PrefixDelta("a", 0, [4], 1),
        PrefixDelta("a", -1, [4], 1),
        PrefixDelta("a", 3, [4], 1, None, -1),
    ],
    ids=["unknown", "beyond the tokens", "beyond the blocks", "no parameters", "negative", "negative block"],
)
def test_a_delta_that_does_not_continue_a_held_prefix_is_missing_and_none_is_applied(delta):
    table, _ = table_of(whole("a", [1, 2, 3], [7, 8]))
    assert table.update([], [whole("c", [1]), delta]) == [delta.request_id]
    assert len(table._prefixes) == 1
    assert table["a"].request.token_ids == [1, 2, 3]


def test_the_least_recently_used_are_evicted_first_and_never_the_current_batch():
    table, forgotten = table_of(whole("a", [1]), whole("b", [1]), capacity=2)
    table.update([], [PrefixDelta("a", 1, [2], 1)])
    table.update([], [whole("c", [1])])
    assert forgotten == ["b"]
    table.update([], [whole(name, [1]) for name in "defg"])
    assert forgotten == ["b", "a", "c"]
    assert len(table._prefixes) == 4


def test_parameters_are_sent_once():
    known = Acknowledged()
    row = propose_row("a", [1, 2, 3])
    assert known.deltas([row])[0][0].params == row.request.params
    known.acknowledge([], [row])
    assert known.deltas([row])[0][0].params is None
    assert known.deltas([row])[0][0].token_ids == []


def test_whatever_is_lost_evicted_or_preempted_the_worker_holds_what_was_committed():
    """500 random rounds over 6 requests and a table for 3, a third of the messages lost on either way."""
    rng = random.Random(0)
    table, known = PrefixTable(3, {}.get), Acknowledged()
    tokens = {name: [rng.randrange(9)] for name in "abcdef"}
    blocks = {name: block_table([1]) for name in tokens}
    num_resent = 0
    for _ in range(500):
        names = rng.sample(sorted(tokens), 2)
        for name in names:
            tokens[name] += [rng.randrange(9) for _ in range(rng.randrange(4))]
            new_blocks = [rng.randrange(20) for _ in range(rng.randrange(4))]
            if rng.random() < 0.3:
                blocks[name] = block_table(new_blocks)
            elif rng.random() < 0.3:
                blocks[name].extend(new_blocks)
        rows = [replace(verify_row(name, tokens[name]), block_ids=blocks[name]) for name in names]
        deltas, _ = known.deltas(rows)
        if rng.random() < 0.3:
            continue
        if missing := table.update([], deltas):
            num_resent += 1
            known.forget(missing)
            deltas, _ = known.deltas(rows)
            assert table.update([], deltas) == []
        for name in names:
            assert table[name].request.token_ids == tokens[name]
            assert table[name].block_ids == blocks[name]
        if rng.random() < 0.7:
            known.acknowledge([], rows)
    assert num_resent > 20


def test_a_worker_learns_how_long_an_encoders_input_is():
    request = Request("a", [5, 6, 0, 9], 3, SamplingParams(), input_length=2)
    (delta,), _ = Acknowledged().deltas([ProposeRow(request, 1)])
    assert table_of(delta)[0]["a"].request == request
