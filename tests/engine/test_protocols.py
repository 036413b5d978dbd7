"""Requests, rows and drafts: who sees later tokens, and what a row says about its pass."""

import pytest

from engine.llm import run_in_process
from engine.protocols import NO_DRAFT, DeferringDrafter, Draft, NoDrafter, ProposeRow, Request, VerifyRow, chain
from engine.sampling.params import SamplingParams


def request(token_ids=(5, 6, 7, 8), prompt_length=2, **params):
    return Request("a", list(token_ids), prompt_length, SamplingParams(**params))


def test_the_output_is_what_follows_the_prompt():
    assert request().output == [7, 8]
    assert request(prompt_length=4).output == []


def test_a_copy_does_not_see_what_its_owner_commits_later():
    owned = request()
    shared, kept = ProposeRow(owned, 3), owned.copy()
    owned.token_ids.append(9)
    assert shared.request.token_ids == [5, 6, 7, 8, 9]
    assert kept.token_ids == [5, 6, 7, 8]
    assert (kept.request_id, kept.prompt_length, kept.params) == ("a", 2, owned.params)


@pytest.mark.parametrize(("start", "length", "reaches_tip"), [(0, 4, True), (3, 1, True), (0, 3, False), (1, 2, False)])
def test_a_row_reaches_the_tip_when_it_computes_the_last_committed_token(start, length, reaches_tip):
    assert VerifyRow(request(), start, length, [1], NO_DRAFT).reaches_tip == reaches_tip


@pytest.mark.parametrize(
    ("start", "length", "expected"), [(0, 2, 2), (0, 3, 2), (0, 4, 2), (1, 3, 1), (2, 2, 0), (3, 1, 0)]
)
def test_each_prompt_token_but_the_first_has_its_log_probability_at_the_token_before_it(start, length, expected):
    row = VerifyRow(request(prompt_length=3, prompt_logprobs=0), start, length, [1], NO_DRAFT)
    assert row.num_prompt_logprobs == expected
    row = VerifyRow(request(prompt_length=3), start, length, [1], NO_DRAFT)
    assert row.num_prompt_logprobs == 0


def test_a_chain_is_the_tree_in_which_each_token_follows_the_one_before_it():
    assert chain([4, 5, 6]).parents == [-1, 0, 1]
    assert chain([4, 5, 6]).is_chain
    assert NO_DRAFT.is_chain
    assert not Draft([4, 5], [-1, -1]).is_chain


def test_no_drafter_proposes_an_empty_draft_for_every_row():
    rows = [ProposeRow(request(), 3), ProposeRow(request(), 0)]
    assert run_in_process(NoDrafter().propose(rows)) == [NO_DRAFT, NO_DRAFT]


def test_a_deferring_drafter_leaves_each_rows_tokens_to_the_target():
    rows = [ProposeRow(request(), 3), ProposeRow(request(), 0)]
    drafter = DeferringDrafter()
    assert run_in_process(drafter.propose(rows)) == [Draft(num_deferred=3), NO_DRAFT]
    assert drafter.release("a") is None
