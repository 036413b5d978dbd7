"""Every way in which a draft can be malformed is seen, and what drafters make is not refused."""

import pytest

from engine.drafting.check import draft_problem
from engine.protocols import Draft, chain

TREE = Draft([5, 6, 7], [-1, 0, -1])
ROW = Draft([4], [-1], [[4, 9]], [[0.5, 0.5]])


@pytest.mark.parametrize("draft", [Draft(), chain([1, 2, 9]), TREE, ROW, Draft([4], [-1], [[4, 9]], [[0.4996, 0.5]])])
def test_a_valid_draft_has_no_problem(draft):
    assert draft_problem(draft, 3, 10) is None


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        (chain([1, 2, 3, 4]), "4 tokens, at most 3 requested"),
        (Draft([1, 2], [-1]), "1 parents for 2"),
        (chain([10]), "outside 0 to 9"),
        (chain([-1]), "outside 0 to 9"),
        (Draft([1, 2], [-1, 1]), "parent"),
        (Draft([1], [-2]), "parent"),
        (Draft([4], [-1], [[4]], None), "some tokens only"),
        (Draft([4], [-1], [[4]], [[1.0], [1.0]]), "some tokens only"),
        (Draft([4, 4], [-1, 0], [[4]], [[1.0]]), "some tokens only"),
        (Draft([4], [-1], [[10]], [[1.0]]), "invalid token ids"),
        (Draft([4], [-1], [[4, 5]], [[1.0]]), "invalid token ids"),
        (Draft([4], [-1], [[4, 5, 4]], [[0.4, 0.2, 0.4]]), "names a token twice"),
        (Draft([4], [-1], [[]], [[]]), "not in its distribution"),
        (Draft([4], [-1], [[4]], [[float("nan")]]), "sum to nan"),
        (Draft([4], [-1], [[4, 5]], [[1.5, -0.5]]), "negative"),
        (Draft([4], [-1], [[4, 5]], [[0.5, 0.4]]), "sum to 0.9"),
        (Draft([4], [-1], [[4, 5]], [[0.7, 0.7]]), "sum to 1.4"),
        (Draft([4], [-1], [[4, 5]], [[0.0, 1.0]]), "cannot have been sampled"),
    ],
)
def test_a_malformed_draft_is_described(draft, problem):
    assert problem in (draft_problem(draft, 3, 10) or "")
