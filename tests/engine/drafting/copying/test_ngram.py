"""NgramDrafter: what followed the last tokens at their latest earlier place; every match in the window is found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafting.copying.ngram import MAX_MATCH, MAX_READ, Match, NgramDrafter, TokenIndex
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, ProposeRow, Request, chain, run_in_process


def request(name, tokens, **params):
    return Request(name, list(tokens), len(tokens), SamplingParams(**({"max_tokens": 100} | params)))


def propose(drafter, *rows):
    return run_in_process(drafter.propose([ProposeRow(request, count) for request, count in rows]))


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # the latest
        ([0, 1, 2, 3, 9, 1, 2, 4, 0, 1, 2], 1, [3]),  # but the longer n-gram
        ([1, 2, 3, 4, 1, 2], 0, []),
        ([1, 2, 3, 4], 3, []),
        ([1], 3, []),
    ],
)
def test_the_draft_is_what_followed_the_last_tokens(tokens, count, expected):
    assert propose(NgramDrafter(), (request("a", tokens), count)) == [chain(expected)]


def test_a_long_prompt_is_read_in_pieces():
    drafter = NgramDrafter()
    text = request("a", [*range(MAX_READ + 8), MAX_READ + 1, MAX_READ + 2])
    assert propose(drafter, (text, 2)) == [NO_DRAFT]
    assert propose(drafter, (text, 2)) == [chain([MAX_READ + 3, MAX_READ + 4])]


def test_a_request_that_has_ended_is_forgotten():
    drafter = NgramDrafter()
    propose(drafter, (request("a", [1, 2, 3]), 2))
    drafter.release("a")
    drafter.release("never seen")
    assert propose(drafter, (request("a", [1, 2]), 2)) == [NO_DRAFT]


def make(tokens, *, window=256, orders=(4, 2)):
    index = TokenIndex(window, orders)
    index.extend(tokens)
    return index


def searched(tokens, context, window, orders):
    """Every match, by comparing tokens; positions before the window do not exist."""
    oldest = max(len(tokens) - window, 0)
    matches = []
    for position in range(len(tokens) - 2, oldest - 1, -1):
        length = 0
        while (
            length < min(len(context), MAX_MATCH)
            and position - length >= oldest
            and tokens[position - length] == context[-1 - length]
        ):
            length += 1
        matches.append(Match(length, position + 1))
    for n in orders:
        if found := [match for match in matches if match.length >= n]:
            return sorted(found, key=lambda match: -match.length)
    return []


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([(2,), (4, 2), (8, 3, 1)]),
)
def test_matches_are_those_of_a_search_in_the_window(tokens, context, window, orders):
    matches = make(tokens, window=window, orders=orders).matches(context)
    expected = searched(tokens, context, window, orders)
    if len(expected) < 8:  # hashes collide in tables this small, and a chain is followed for a few steps only
        assert set(matches) <= set(expected)
    assert matches == sorted(matches, key=lambda match: (-match.length, -match.end))
    assert {match.length for match in matches} <= {match.length for match in expected}


def test_what_left_the_window_is_forgotten():
    index = make([1, 2, 3, *range(10, 22)], window=16)
    assert index.matches([1, 2]) == [Match(2, 2)]
    index.extend([22, 23])
    assert index.matches([1, 2]) == []
    assert index.tail(100) == [2, 3, *range(10, 24)]
