"""The plan of a round: whose length is chosen, who gets it, and what is learned from the round."""

import pytest

from engine.config import EngineConfig
from engine.control.acceptance import ChainAcceptance
from engine.control.plan import Plan, Planner, RoundSeconds
from engine.params import SamplingParams
from engine.protocols import NoDrafter, Request, ScheduledRow, Verdict
from tests.engine.control.test_goodput import RecordingDrafter
from tests.engine.running import make_engine, run
from tests.engine.test_exactness import TARGET

K = 4


class Copier(NoDrafter):
    """Copies for some requests, and keeps what it was asked."""

    def __init__(self, **copies):
        self.copies = copies

    def plan_copies(self, rows, gains):
        self.rows, self.gains = rows, gains
        return self.copies


def request(name="a", length=None, *, fixed=False):
    return Request(name, [1, 2], 2, SamplingParams(num_speculative_tokens=length, fixes_draft_length=fixed))


def planner(drafter=None, **settings):
    config = EngineConfig(**({"num_speculative_tokens": K} | settings))
    return Planner(config, ChainAcceptance(K), drafter or NoDrafter())


@pytest.mark.parametrize(
    ("limit", "fixed", "expected"), [(None, False, 2), (1, False, 1), (3, False, 2), (3, True, 3), (0, True, 0)]
)
def test_a_request_gets_the_chosen_length_within_its_limit_or_its_fixed_length(limit, fixed, expected):
    assert Plan(2).length_of(request(length=limit, fixed=fixed)) == expected


def test_a_copy_is_as_long_as_it_was_planned():
    assert [Plan(2, copies={"a": 9}).length_of(request(name)) for name in "ab"] == [9, 2]


def test_limits_are_those_of_requests_whose_length_is_chosen():
    requests = [request(length=length) for length in (0, 2, None, 9)]
    plan = planner().plan([*requests, request(length=3, fixed=True)], has_prompts=False)
    assert plan.limits == [0, 2, K, K]


def test_copies_are_planned_with_the_acceptance_of_the_drafts_that_they_replace():
    copier = Copier(b=7)
    plan = planner(copier).plan([request("a"), request("b", 2), request("c", 1, fixed=True)], has_prompts=False)
    assert [(row.request.request_id, row.num_draft_tokens) for row in copier.rows] == [("a", K), ("b", 2)]
    assert copier.gains == ChainAcceptance(K).gains()
    assert plan.copies == {"b": 7}


@pytest.mark.parametrize("drafter", [None, Copier(), Copier(a=2)])
@pytest.mark.parametrize("has_fixed", [False, True])
@pytest.mark.parametrize("has_prompts", [False, True])
def test_only_a_round_of_chosen_lengths_is_measured(drafter, has_fixed, has_prompts):
    decoding = [request(), *([request("b", 1, fixed=True)] if has_fixed else [])]
    plan = planner(drafter).plan(decoding, has_prompts=has_prompts)
    assert plan.is_measured == (not has_fixed and not has_prompts and plan.copies == {})


def test_a_round_of_fixed_lengths_counts_as_the_longest_of_them():
    decoding = [request(length=1, fixed=True), request(length=3, fixed=True)]
    plan = planner().plan(decoding, has_prompts=False)
    assert (plan.num_draft_tokens, plan.reason) == (3, "request")


def test_acceptance_is_learned_from_chosen_lengths_and_times_from_whole_rounds():
    control = planner(Copier(copied=3))
    batch = [
        ScheduledRow(request("chosen"), 2, 1, 1, []),
        ScheduledRow(request("copied"), 3, 1, 1, []),
        ScheduledRow(request("fixed", 1, fixed=True), 1, 1, 1, []),
    ]
    learned, times = [], []
    control.goodput.acceptance.observe = lambda length, path: learned.append((length, path))
    control.goodput.observe = lambda limits, seconds: times.append((limits, seconds))
    plan = control.plan([row.request for row in batch], has_prompts=False)
    control.observe(plan, batch, [Verdict([5, 6], [0]), Verdict([5]), Verdict([5])], RoundSeconds(0.5))
    assert (learned, times) == ([(2, [0])], [])
    plan = Plan(2, limits=[K], is_measured=True)
    control.observe(plan, batch[:1], [Verdict([5])], RoundSeconds(0.25))
    assert times == [([K], 0.25)]
    control.observe(plan, [batch[0], batch[0]], [Verdict([5])] * 2, RoundSeconds(0.25))
    assert len(times) == 1, "the round computed a prompt, too"


@pytest.mark.parametrize(("limit", "lengths"), [(None, [0, K]), (0, [])])
def test_a_drafter_gets_a_prompt_before_its_first_draft_but_no_request_without_drafts(limit, lengths):
    drafter = RecordingDrafter(NoDrafter())
    engine = make_engine(TARGET, lambda _: drafter, num_speculative_tokens=K, speculation="fixed")
    run(engine, [([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True, num_speculative_tokens=limit))])
    assert drafter.lengths[:2] == lengths
