"""NgramDrafter: what followed the last tokens at their latest earlier place."""

import pytest

from engine.drafting.copying.ngram import MAX_READ, NgramDrafter
from engine.llm import run_in_process
from engine.protocols import NO_DRAFT, ProposeRow, Request, chain
from engine.sampling.params import SamplingParams


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


def test_rows_of_a_batch_have_nothing_to_do_with_each_other():
    drafter = NgramDrafter()
    rows = (request("a", [1, 2, 3, 1, 2]), 2), (request("b", [1, 2, 5, 6]), 2)
    assert propose(drafter, *rows) == [chain([3, 1]), NO_DRAFT]


def test_committed_tokens_are_searched_too():
    drafter, text = NgramDrafter(), request("a", [1, 2])
    assert propose(drafter, (text, 4)) == [NO_DRAFT]
    text.token_ids.extend([7, 8, 1, 2])
    assert propose(drafter, (text, 4)) == [chain([7, 8, 1, 2])]


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
