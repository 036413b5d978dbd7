"""Requests, rows and drafts: who sees later tokens, and what a row says about its pass."""

import pytest

from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, Draft, ProposeRow, Request, VerifyRow, chain, run_in_process


def request(token_ids=(5, 6, 7, 8), prompt_length=2, **params):
    return Request("a", list(token_ids), prompt_length, SamplingParams(**params))


def test_a_copy_does_not_see_what_its_owner_commits_later():
    owned = request()
    shared, kept = ProposeRow(owned, 3), owned.copy()
    owned.token_ids.append(9)
    assert shared.request.token_ids == [5, 6, 7, 8, 9]
    assert kept.token_ids == [5, 6, 7, 8]
    assert (kept.request_id, kept.prompt_length, kept.params) == ("a", 2, owned.params)


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


def test_work_in_process_runs_to_its_end_but_may_not_wait():
    def passes():
        yield
        yield
        return 5

    class Waiting:
        def __await__(self):
            yield self

    async def waits():
        await Waiting()

    assert run_in_process(passes()) == 5
    with pytest.raises(RuntimeError, match="must only compute"):
        run_in_process(waits())
