"""Every way in which a reply can be impossible is seen before the engine uses it."""

from dataclasses import replace

import pytest

from cluster.protocol.messages import MalformedMessageError
from cluster.protocol.validation import check_proposal, check_verdicts, with_drafts
from engine.protocols import Draft, TokenLogprobs, Verdict, chain
from tests.cluster.fakes import propose_row, verify_row

ROW = propose_row("a", [1], k=3)
TREE = Draft([5, 6, 7], [-1, 0, -1])


@pytest.mark.parametrize("draft", [Draft(), chain([1, 2, 9]), TREE, Draft([4], [-1], [[4, 9]], [[0.5, 0.5]])])
def test_a_valid_draft_passes(draft):
    check_proposal([draft], [ROW], 10)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (chain([1, 2, 3, 4]), "4 tokens, at most 3 requested"),
        (Draft(num_deferred=2), "left to the target"),
        (Draft([4], [-1], [[4, 5]], [[0.7, 0.7]]), "sum to 1.4"),
    ],
)
def test_a_malformed_draft_is_refused_with_its_request_and_its_reason(draft, message):
    with pytest.raises(MalformedMessageError, match=f"draft of a: .*{message}"):
        check_proposal([draft], [ROW], 10)


def check(verdicts, rows):
    check_verdicts(with_drafts(verdicts, rows), rows, 10)


def tree_row():
    return replace(verify_row("a", [1, 2]), draft=TREE)


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict([9]),
        Verdict([5, 1], [0]),
        Verdict([5, 6, 1], [0, 1]),
        Verdict([7, 1], [2]),
        Verdict(error="too complex"),
    ],
)
def test_a_valid_verdict_passes(verdict):
    check([verdict], [tree_row()])
    assert with_drafts([verdict], [tree_row()])[0].error == verdict.error


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (Verdict([]), "0 tokens after 0"),
        (Verdict([1, 2], []), "2 tokens after 0"),
        (Verdict([10]), "outside"),
        (Verdict([6, 1], [1]), "path"),
        (Verdict([5, 7, 1], [0, 2]), "path"),
        (Verdict([5, 1], [3]), "path"),
        (Verdict([5, 1], [-1]), "path"),
        (Verdict([6, 1], [0]), "not drafted"),
        (Verdict([9], error="too complex"), "tokens beside an error"),
    ],
)
def test_an_invalid_verdict_is_refused_with_its_reason(verdict, message):
    with pytest.raises(MalformedMessageError, match=f"verdict of a: .*{message}"):
        check([verdict], [tree_row()])


def deferred_row():
    return replace(verify_row("a", [1, 2]), draft=Draft(num_deferred=2))


@pytest.mark.parametrize(
    "verdict", [Verdict([5, 1], [0], draft=chain([5, 6])), Verdict([9], draft=chain([5])), Verdict([9], draft=Draft())]
)
def test_a_verdict_on_what_the_target_drafted_itself_passes(verdict):
    check([verdict], [deferred_row()])


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (Verdict([5, 1], [0]), "a path that is not in the draft"),
        (Verdict([9], draft=chain([5, 6, 7])), "3 tokens, at most 2 requested"),
        (Verdict([9], draft=Draft([5], [])), "0 parents for 1"),
        (Verdict([5, 1], [0], draft=chain([6])), "not drafted"),
    ],
)
def test_an_invalid_draft_of_the_target_is_refused_with_its_reason(verdict, message):
    with pytest.raises(MalformedMessageError, match=f"verdict of a: .*{message}"):
        check([verdict], [deferred_row()])


def test_a_verdict_gets_the_draft_that_was_sent_and_keeps_that_of_the_target():
    verdicts = [Verdict([9], draft=chain([5])), Verdict([9], draft=chain([5]))]
    assert [verdict.draft for verdict in with_drafts(verdicts, [tree_row(), deferred_row()])] == [TREE, chain([5])]
    with pytest.raises(MalformedMessageError, match="2 verdicts for 1 rows"):
        with_drafts(verdicts, [tree_row()])


def test_an_unfinished_prefill_brings_no_token():
    row = replace(verify_row("a", [1, 2, 3]), start=0)
    check_verdicts([Verdict()], [row], 10)
    with pytest.raises(MalformedMessageError, match="unfinished prefill"):
        check_verdicts([Verdict([1])], [row], 10)


def test_prompt_log_probabilities_must_be_complete():
    row = verify_row("a", [1, 2, 3])
    request = replace(row.request, prompt_length=3, params=replace(row.request.params, prompt_logprobs=0))
    row = replace(row, request=request, start=0, length=3)
    logprobs = [TokenLogprobs(-1.0, 1, [], [])] * 2
    check_verdicts([Verdict([1], prompt_logprobs=logprobs)], [row], 10)
    with pytest.raises(MalformedMessageError, match="1 prompt log probabilities, 2 requested"):
        check_verdicts([Verdict([1], prompt_logprobs=logprobs[:1])], [row], 10)
