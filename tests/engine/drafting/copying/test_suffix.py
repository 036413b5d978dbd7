"""SuffixDrafter: the most frequent continuation of the longest matches, in the request and in its salt's outputs."""

import pytest

from engine.drafting.copying.combined import Continuation
from engine.drafting.copying.suffix import _MAX_SALTS, SuffixDrafter
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, ProposeRow, Request, chain, run_in_process

LONG = list(range(10, 40))


def request(name, prompt, output=(), salt=b""):
    return Request(name, [*prompt, *output], len(prompt), SamplingParams(max_tokens=100), salt)


def propose(drafter, *requests, count=4):
    return run_in_process(drafter.propose([ProposeRow(request, count) for request in requests]))


def written(drafter, name, output, salt=b""):
    """Let the drafter see a whole request."""
    propose(drafter, request(name, [1], output, salt))
    drafter.release(name)


WIDE = list(range(10, 70))
OFTEN, ONCE = [*LONG[:8], 1], [*LONG[:8], 2]
SHORT, LONGER = [7, *LONG[8:16], 1], [*LONG[:16], 2]


@pytest.mark.parametrize(
    ("prompt", "output", "count", "expected"),
    [
        (WIDE, WIDE[:40], 4, WIDE[40:44]),
        (WIDE, WIDE[:40], 16, WIDE[40:56]),
        ([1, 2, 3, 4, 5, 1, 2], [], 4, [3]),  # a short match is continued for a token only
        ([*OFTEN, *OFTEN, *OFTEN, *ONCE], LONG[:8], 1, [1]),  # the most frequent continuation, and not the latest
        ([*SHORT, *LONGER, *SHORT], LONG[:16], 1, [2]),  # a longer match outweighs many shorter ones
        ([token for first in range(1, 7) for token in (*LONG[:10], first)], LONG[:8], 4, LONG[8:10]),  # they differ
    ],
)
def test_the_likeliest_continuation_is_drafted_as_far_as_it_is_likely(prompt, output, count, expected):
    assert propose(SuffixDrafter(), request("a", prompt, output), count=count) == [chain(expected)]


def test_outputs_of_another_salt_are_never_drafted_from():
    drafter = SuffixDrafter()
    written(drafter, "a", LONG, b"one")
    assert propose(drafter, request("b", [1], LONG[:10], b"other")) == [NO_DRAFT]
    assert propose(drafter, request("c", [1], LONG[:10])) == [NO_DRAFT]
    assert propose(drafter, request("d", [1], LONG[:10], b"one")) == [chain(LONG[10:14])]


def test_a_draft_does_not_go_on_from_one_output_into_the_next():
    drafter = SuffixDrafter()
    written(drafter, "a", LONG[:12])
    written(drafter, "b", [1, 2, 3, 4])
    assert propose(drafter, request("c", [1], LONG[:10])) == [chain(LONG[10:12])]


def test_the_salts_that_were_used_last_are_kept():
    drafter = SuffixDrafter()
    salts = [str(i).encode() for i in range(_MAX_SALTS + 1)]
    for salt in salts[:-1]:
        written(drafter, "a", LONG, salt)
    assert propose(drafter, request("b", [1], LONG[:10], salts[0])) == [chain(LONG[10:14])]
    written(drafter, "a", LONG, salts[-1])
    drafts = [propose(drafter, request(salt, [1], LONG[:10], salt)) != [NO_DRAFT] for salt in salts]
    assert drafts == [True, False, *[True] * (_MAX_SALTS - 1)]


def test_drafts_grow_while_they_are_accepted_and_shrink_while_they_are_not():
    drafter = SuffixDrafter()
    for i in range(60):
        text = request(str(i), [5, 6, 7, 8, 9, 5, 6])
        propose(drafter, text)
        text.token_ids.extend([7, 8, 9])
        propose(drafter, text)
    assert propose(drafter, request("then", [5, 6, 7, 8, 9, 5, 6])) == [chain([7, 8, 9, 5])]
    for i in range(200):
        text = request(f"wrong {i}", [5, 6, 7, 8, 9, 5, 6])
        propose(drafter, text)
        text.token_ids.extend([4])
        propose(drafter, text)
    [draft] = propose(drafter, request("at last", [5, 6, 7, 8, 9, 5, 6]))
    assert len(draft.token_ids) <= 1


def judged(truth):
    """How often tokens after matches are accepted, after 7 and 8 were proposed and other tokens came."""
    drafter = SuffixDrafter()
    drafter._proposed["a"] = Continuation([7, 8], 1.0, 2), 2
    drafter._observe(ProposeRow(Request("a", [1, 2, *truth], 2, SamplingParams()), 8))
    return [drafter._acceptance.rate(place) for place in range(5)]


def test_tokens_after_the_first_rejected_one_do_not_count():
    assert judged([5, 8]) == judged([5]) != judged([7, 8])
    assert judged([5])[0] < judged([])[0] < judged([7, 8])[0]
