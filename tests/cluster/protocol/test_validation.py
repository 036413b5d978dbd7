"""Every way in which a reply can be impossible is seen before the engine uses it."""

from dataclasses import replace

import pytest

from cluster.protocol.messages import MalformedMessageError
from cluster.protocol.validation import check_drafts, check_verdicts
from engine.protocols import Draft, TokenLogprobs, Verdict, chain
from tests.cluster.fakes import propose_row, verify_row

ROW = propose_row("a", [1], k=3)
TREE = Draft([5, 6, 7], [-1, 0, -1])


@pytest.mark.parametrize("draft", [Draft(), chain([1, 2, 9]), TREE, Draft([4], [-1], [[4, 9]], [[0.5, 0.5]])])
def test_a_valid_draft_passes(draft):
    check_drafts([draft], [ROW], 10)


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
        check_drafts([draft], [ROW], 10)


def test_there_is_one_draft_per_row():
    with pytest.raises(MalformedMessageError, match="0 drafts for 1 rows"):
        check_drafts([], [ROW], 10)


def tree_row():
    return replace(verify_row("a", [1, 2]), draft=TREE)


@pytest.mark.parametrize(
    "verdict", [Verdict([9]), Verdict([5, 1], [0]), Verdict([5, 6, 1], [0, 1]), Verdict([7, 1], [2])]
)
def test_a_valid_verdict_passes(verdict):
    check_verdicts([verdict], [tree_row()], 10)


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
    ],
)
def test_an_invalid_verdict_is_refused_with_its_reason(verdict, message):
    with pytest.raises(MalformedMessageError, match=f"verdict of a: .*{message}"):
        check_verdicts([verdict], [tree_row()], 10)


def deferred_row():
    return replace(verify_row("a", [1, 2]), draft=Draft(num_deferred=2))


@pytest.mark.parametrize(
    "verdict", [Verdict([5, 1], [0], draft=chain([5, 6])), Verdict([9], draft=chain([5])), Verdict([9], draft=Draft())]
)
def test_a_verdict_on_what_the_target_drafted_itself_passes(verdict):
    check_verdicts([verdict], [deferred_row()], 10)


@pytest.mark.parametrize(
    ("verdict", "row", "message"),
    [
        (Verdict([9]), deferred_row(), "no draft, though it was left to it"),
        (Verdict([9], draft=chain([5, 6, 7])), deferred_row(), "3 tokens, at most 2 requested"),
        (Verdict([9], draft=Draft([5], [])), deferred_row(), "0 parents for 1"),
        (Verdict([5, 1], [0], draft=chain([6])), deferred_row(), "not drafted"),
        (Verdict([9], draft=chain([5])), tree_row(), "a draft that was not left to it"),
    ],
)
def test_an_invalid_draft_of_the_target_is_refused_with_its_reason(verdict, row, message):
    with pytest.raises(MalformedMessageError, match=f"verdict of a: .*{message}"):
        check_verdicts([verdict], [row], 10)


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
