"""How often drafts are accepted before and after a swap."""

import pytest

from engine.drafting.learning import swap_watch
from engine.drafting.learning.swap_watch import MIN_REQUESTS, ROUNDS, SwapWatch, Verified
from engine.params import SamplingParams
from engine.protocols import Draft, ProposeRow, Request, chain


def rounds(watch, accepted, count=ROUNDS, num_requests=MIN_REQUESTS):
    """Rounds of requests in turn whose drafts of four tokens are accepted as far as that."""
    requests = [Request(str(i), [1], 1, SamplingParams()) for i in range(num_requests)]
    for i in range(count):
        request = requests[i % num_requests]
        wanted = accepted if isinstance(accepted, int) else accepted[i % len(accepted)]
        watch.drafted([ProposeRow(request, 4)], [chain([7, 7, 7, 7])])
        request.token_ids.extend([7] * wanted + [8])
        watch.observe([request])
        if i < count - 1:
            assert not watch.is_bad()
    return watch.is_bad()


@pytest.mark.parametrize(
    ("before", "after", "is_bad"), [(3, 1, True), (3, 3, False), (1, 3, False), (3, [3, 3, 3, 3, 2], False)]
)
def test_a_swap_is_bad_if_fewer_draft_tokens_are_accepted_in_the_rounds_after_it(before, after, is_bad):
    watch = SwapWatch()
    rounds(watch, before, 2 * ROUNDS)
    watch.begin()
    assert rounds(watch, after) == is_bad
    assert not watch.is_watching
    assert not rounds(watch, 0)  # it is judged once


def test_without_rounds_before_it_no_swap_is_bad():
    watch = SwapWatch()
    watch.begin()
    assert not rounds(watch, 0)


def test_a_swap_is_not_judged_by_a_few_texts_which_may_be_hard():
    watch = SwapWatch()
    rounds(watch, 3, 2 * ROUNDS)
    watch.begin()
    assert not rounds(watch, 0, 2 * ROUNDS, num_requests=2)
    assert watch.is_watching


def test_a_draft_is_compared_as_far_as_its_request_went_on():
    watch = SwapWatch()
    tree = Draft([5, 6, 7, 8], [-1, -1, 1, 2])
    for committed, expected in (
        ([6, 7, 9], (3, 2)),
        ([6, 7, 8, 9], (3, 3)),
        ([6], (1, 1)),
        ([9], (1, 0)),
        ([5, 9], (1, 1)),
    ):
        request = Request("a", [1, 2], 2, SamplingParams())
        watch.drafted([ProposeRow(request, 4)], [tree])
        request.token_ids.extend(committed)
        watch.observe([request])
        assert watch._requests.pop("a") == Verified(*expected)
    watch.drafted([ProposeRow(request, 4)], [tree])
    watch.release("a")
    assert watch._drafts == {}


def test_drafts_of_requests_whose_end_nobody_tells_are_forgotten(monkeypatch):
    monkeypatch.setattr(swap_watch, "_MOST_DRAFTS", 3)
    watch = SwapWatch()
    for name in "abcde":
        watch.drafted([ProposeRow(Request(name, [1], 1, SamplingParams()), 1)], [chain([7])])
    assert [*watch._drafts] == ["c", "d", "e"]
