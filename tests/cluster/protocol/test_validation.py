"""Every way in which a reply can be impossible is seen before the engine uses it."""

import math
from dataclasses import replace

import pytest

from cluster.protocol.messages import MalformedMessageError
from cluster.protocol.validation import check_proposal, check_verdicts, with_drafts
from engine.protocols import Difference, Draft, TokenLogprobs, Verdict, chain
from tests.cluster.fakes import propose_row, verify_row

ROW = propose_row("a", [1], k=3)
TREE = Draft([5, 6, 7], [-1, 0, -1])
TREE_ROW = replace(verify_row("a", [1, 2]), draft=TREE)
DEFERRED_ROW = replace(verify_row("a", [1, 2]), draft=Draft(num_deferred=2))
"""Its draft is left to the target."""
PREFILL_ROW = replace(verify_row("a", [1, 2, 3]), start=0)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft(), None),
        (chain([1, 2, 9]), None),
        (TREE, None),
        (Draft([4], [-1], [[4, 9]], [[0.5, 0.5]]), None),
        (chain([1, 2, 3, 4]), "4 tokens, at most 3 requested"),
        (Draft(num_deferred=2), "left to the target"),
        (Draft([4], [-1], [[4, 5]], [[0.7, 0.7]]), "sum to 1.4"),
    ],
)
def test_a_malformed_draft_is_refused_with_its_request_and_its_reason(draft, message):
    if message is None:
        check_proposal([draft], [ROW], 10)
    else:
        with pytest.raises(MalformedMessageError, match=f"draft of a: .*{message}"):
            check_proposal([draft], [ROW], 10)


@pytest.mark.parametrize(
    ("row", "verdict", "message"),
    [
        (TREE_ROW, Verdict([9]), None),
        (TREE_ROW, Verdict([5, 1], [0]), None),
        (TREE_ROW, Verdict([5, 6, 1], [0, 1]), None),
        (TREE_ROW, Verdict([7, 1], [2]), None),
        (TREE_ROW, Verdict(error="too complex"), None),
        (TREE_ROW, Verdict([5, 1], [0], differences=[Difference(1, 9, math.inf)]), None),
        (TREE_ROW, Verdict([5, 1], [0], differences=[Difference(2, 9, 0.5)]), "a difference from token 9 at 2"),
        (TREE_ROW, Verdict([5, 1], [0], differences=[Difference(-1, 9, 0.5)]), "a difference from token 9 at -1"),
        (TREE_ROW, Verdict([5, 1], [0], differences=[Difference(0, 10, 0.5)]), "a difference from token 10 at 0"),
        (TREE_ROW, Verdict([]), "0 tokens after 0"),
        (TREE_ROW, Verdict([1, 2], []), "2 tokens after 0"),
        (TREE_ROW, Verdict([10]), "outside"),
        (TREE_ROW, Verdict([6, 1], [1]), "path"),
        (TREE_ROW, Verdict([5, 7, 1], [0, 2]), "path"),
        (TREE_ROW, Verdict([5, 1], [3]), "path"),
        (TREE_ROW, Verdict([5, 1], [-1]), "path"),
        (TREE_ROW, Verdict([6, 1], [0]), "not drafted"),
        (TREE_ROW, Verdict([9], error="too complex"), "tokens beside an error"),
        (DEFERRED_ROW, Verdict([5, 1], [0], draft=chain([5, 6])), None),
        (DEFERRED_ROW, Verdict([9], draft=Draft()), None),
        (DEFERRED_ROW, Verdict([5, 1], [0]), "a path that is not in the draft"),
        (DEFERRED_ROW, Verdict([9], draft=chain([5, 6, 7])), "3 tokens, at most 2 requested"),
        (DEFERRED_ROW, Verdict([9], draft=Draft([5], [])), "0 parents for 1"),
        (DEFERRED_ROW, Verdict([5, 1], [0], draft=chain([6])), "not drafted"),
        (PREFILL_ROW, Verdict(), None),
        (PREFILL_ROW, Verdict([1]), "unfinished prefill"),
    ],
)
def test_an_invalid_verdict_is_refused_with_its_reason(row, verdict, message):
    verdicts = with_drafts([verdict], [row])
    if message is None:
        check_verdicts(verdicts, [row], 10)
        assert verdicts[0].error == verdict.error
    else:
        with pytest.raises(MalformedMessageError, match=f"verdict of a: .*{message}"):
            check_verdicts(verdicts, [row], 10)


def test_a_verdict_gets_the_draft_that_was_sent_and_keeps_that_of_the_target():
    verdicts = [Verdict([9], draft=chain([5])), Verdict([9], draft=chain([5]))]
    assert [verdict.draft for verdict in with_drafts(verdicts, [TREE_ROW, DEFERRED_ROW])] == [TREE, chain([5])]
    with pytest.raises(MalformedMessageError, match="2 verdicts for 1 rows"):
        with_drafts(verdicts, [TREE_ROW])


def test_prompt_log_probabilities_must_be_complete():
    params = replace(PREFILL_ROW.request.params, prompt_logprobs=0)
    row = replace(PREFILL_ROW, request=replace(PREFILL_ROW.request, prompt_length=3, params=params), length=3)
    logprobs = [TokenLogprobs(-1.0, 1, [], [])] * 2
    check_verdicts([Verdict([1], prompt_logprobs=logprobs)], [row], 10)
    with pytest.raises(MalformedMessageError, match="1 prompt log probabilities, 2 requested"):
        check_verdicts([Verdict([1], prompt_logprobs=logprobs[:1])], [row], 10)


def test_a_verdict_gets_its_draft_back_and_loses_nothing():
    scores = [TokenLogprobs(-0.5, 1, [], [])]
    verdict = Verdict([5, 1], [0], scores, scores, Draft(), "", [Difference(1, 9, 0.5)])
    assert with_drafts([verdict], [TREE_ROW]) == [replace(verdict, draft=TREE)]
