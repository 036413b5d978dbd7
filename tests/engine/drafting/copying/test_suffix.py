"""SuffixDrafter: the most frequent continuation of the longest matches, in the request and in its salt's outputs."""

import torch

from engine.drafting.copying.combined import Continuation
from engine.drafting.copying.ngram import TokenIndex
from engine.drafting.copying.suffix import _MAX_SALTS, SuffixDrafter
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, ProposeRow, Request, chain, run_in_process
from tests.engine.running import make_engine, step
from tests.fakes import ContextModel

LONG = list(range(10, 40))


def request(name, prompt, output=(), salt=b""):
    return Request(name, [*prompt, *output], len(prompt), SamplingParams(max_tokens=100), salt)


def propose(drafter, *requests, count=4):
    return run_in_process(drafter.propose([ProposeRow(request, count) for request in requests]))


def written(drafter, name, output, salt=b""):
    """Let the drafter see a whole request."""
    propose(drafter, request(name, [1], output, salt))
    drafter.release(name)


def test_a_long_match_is_continued_as_far_as_asked():
    tokens = list(range(10, 70))
    text = request("a", tokens, tokens[:40])
    for count in (4, 16):
        assert propose(SuffixDrafter(), text, count=count) == [chain(tokens[40 : 40 + count])]


def test_a_short_match_is_continued_for_a_token_only():
    assert propose(SuffixDrafter(), request("a", [1, 2, 3, 4, 5, 1, 2])) == [chain([3])]


def test_the_most_frequent_continuation_is_drafted_and_not_the_latest():
    often, once = [*LONG[:8], 1], [*LONG[:8], 2]
    text = request("a", [*often, *often, *often, *once], LONG[:8])
    assert propose(SuffixDrafter(), text, count=1) == [chain([1])]


def test_a_longer_match_outweighs_many_shorter_ones():
    short, long = [7, *LONG[8:16], 1], [*LONG[:16], 2]
    text = request("a", [*short, *long, *short], LONG[:16])
    assert propose(SuffixDrafter(), text, count=1) == [chain([2])]


def test_a_draft_ends_where_continuations_differ_too_much():
    heads = [[*LONG[:10], first] for first in (1, 2, 3, 4, 5, 6)]
    text = request("a", [token for head in heads for token in head], LONG[:8])
    assert propose(SuffixDrafter(), text) == [chain(LONG[8:10])]


def test_outputs_of_ended_requests_are_drafted_from():
    drafter = SuffixDrafter()
    written(drafter, "a", LONG)
    assert propose(drafter, request("b", [1], LONG[:10])) == [chain(LONG[10:14])]


def test_prompts_of_ended_requests_are_not():
    drafter = SuffixDrafter()
    propose(drafter, request("a", LONG))
    drafter.release("a")
    assert propose(drafter, request("b", [1], LONG[:10])) == [NO_DRAFT]


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


def test_without_memory_outputs_are_not_drafted_from():
    drafter = SuffixDrafter(remembers_outputs=False)
    written(drafter, "a", LONG)
    assert propose(drafter, request("b", [1], LONG[:10])) == [NO_DRAFT]


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


def test_the_same_request_again_is_drafted_whole_but_not_for_another_salt():
    model = ContextModel(torch.randn(9, 50, generator=torch.Generator().manual_seed(1)).softmax(-1))
    engine = make_engine(model, lambda _: SuffixDrafter(), num_speculative_tokens=8)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=200, ignore_eos=True)
    rounds = []
    for i, salt in enumerate(["mine", "mine", "yours"]):
        engine.add(str(i), [3, 1, 4], params, cache_salt=salt)
        before = engine.stats.num_rounds_by_length.total()
        while engine.has_work:
            step(engine)
        rounds.append(engine.stats.num_rounds_by_length.total() - before)
    assert rounds[1] < 0.7 * rounds[0]
    assert rounds[2] > 1.3 * rounds[1]


def expected_after(drafter, match_length):
    """How many of two tokens after a match of such a length are expected to be accepted."""
    index = TokenIndex(1024, drafter.orders)
    index.extend(list(range(200)))
    return drafter._follow(index, [10], match_length, 2).num_expected


def test_longer_matches_are_expected_to_go_on_more_often_before_anything_is_known():
    expected = [expected_after(SuffixDrafter(), length) for length in (1, 2, 4, 8, 16, 32, 100)]
    assert expected == sorted(expected)
    assert expected[0] < expected[2] < expected[3] < expected[4]
    assert expected[-1] == expected[-2]


def judged(drafter, truth):
    """Let a drafter propose 7 and 8 after a match of two tokens, and see what came instead."""
    drafter._proposed["a"] = Continuation([7, 8], 1.0, 2), 2
    drafter._observe(ProposeRow(Request("a", [1, 2, *truth], 2, SamplingParams()), 8))
    return [drafter._acceptance.rate(place) for place in range(5)]


def test_tokens_after_the_first_rejected_one_do_not_count():
    before = [SuffixDrafter()._acceptance.rate(place) for place in range(5)]
    rejected, accepted = judged(SuffixDrafter(), [5, 8]), judged(SuffixDrafter(), [7, 8])
    assert rejected[0] < before[0] < accepted[0]
    assert rejected == judged(SuffixDrafter(), [5])


def test_a_length_that_is_not_drafted_from_any_more_is_tried_again_after_a_while():
    drafter = SuffixDrafter()
    for _ in range(300):
        low = judged(drafter, [5])[0]
    assert low < 0.05
    index = TokenIndex(1024, drafter.orders)
    index.extend([1, 2, 3, 1, 2])
    for _ in range(1000):
        drafter._best(index, index.matches([1, 2]), 1)
    assert drafter._acceptance.rate(0) > 0.2
