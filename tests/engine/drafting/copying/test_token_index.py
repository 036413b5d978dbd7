"""TokenIndex: the matches that it finds are those that a search through the whole window finds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafting.copying.token_index import MAX_MATCH, Match, TokenIndex


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


def test_the_longest_matches_come_first_and_the_latest_among_equals():
    index = make([1, 2, 3, 4, 9, 7, 3, 4, 8, 2, 3, 4, 6, 7, 3, 4])
    assert index.matches([2, 3, 4]) == [Match(3, 12), Match(3, 4), Match(2, 8)]


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


@given(st.lists(st.integers(0, 50), max_size=200), st.integers(2, 6))
def test_no_match_is_missed_where_the_window_is_large(tokens, length):
    context = tokens[-length:]
    expected = searched(tokens, context, 4096, (4, 2))
    if len(expected) <= 8:
        assert make(tokens, window=4096).matches(context) == expected


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(0, 80))
def test_tokens_may_come_in_pieces(tokens, cut):
    index = make(tokens[:cut])
    index.extend(tokens[cut:])
    whole = make(tokens)
    assert index.length == len(tokens)
    assert index.tail(100) == tokens
    assert index.matches(tokens[-5:]) == whole.matches(tokens[-5:])


def test_what_left_the_window_is_forgotten():
    index = make([1, 2, 3, *range(10, 22)], window=16)
    assert index.matches([1, 2]) == [Match(2, 2)]
    index.extend([22, 23])
    assert index.matches([1, 2]) == []
    assert index.tail(100) == [2, 3, *range(10, 24)]


@pytest.mark.parametrize(("position", "token"), [(0, 5), (2, 7), (3, None)])
def test_after_the_end_there_is_no_token(position, token):
    assert make([5, 6, 7]).token(position) == token


def test_the_end_of_the_text_itself_is_no_match():
    assert make([1, 2, 3, 4]).matches([3, 4]) == []
