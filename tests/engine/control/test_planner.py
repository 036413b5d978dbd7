"""The planner over costs in virtual time, what it learns from, and the engine's text, which must not notice."""

import random
from collections import Counter

import pytest

from engine.config import EngineConfig
from engine.control.plan import Plan, RoundSeconds
from engine.control.planner import Planner
from engine.laws import p_value
from engine.params import SamplingParams
from engine.protocols import NoDrafter, Request, ScheduledRow, Verdict, chain
from tests.engine.control.simulation import LARGE, SMALL, Row, Simulation, uniform_rate
from tests.engine.running import chains, drafters, make_engine, run
from tests.engine.test_exactness import TARGET, UNLIKE, joint_law

K = 4
GREEDY = SamplingParams(temperature=0.0)


class Copier(NoDrafter):
    """Copies for some requests, and keeps what it was asked."""

    def __init__(self, **copies):
        self.copies = copies

    def plan_copies(self, rows, expected):
        self.rows, self.expected = rows, expected
        return self.copies


def request(name="a", length=None, *, fixed=False):
    return Request(name, [1, 2], 2, SamplingParams(num_speculative_tokens=length, fixes_draft_length=fixed))


def planner(drafter=None, **settings):
    config = EngineConfig(**({"num_speculative_tokens": K} | settings))
    return Planner(config, 0, drafter or NoDrafter())


def row(asked, num_draft_tokens, length=1):
    return ScheduledRow(asked, num_draft_tokens, 2 - length, length, [])


def test_a_round_of_fixed_lengths_counts_as_the_longest_of_them():
    plan = planner().plan([request(length=1, fixed=True), request(length=3, fixed=True)], has_prompts=False)
    assert (plan.num_draft_tokens, plan.reason) == (3, "request")


def test_copies_are_planned_with_what_the_drafts_that_they_replace_are_expected_to_bring():
    copier = Copier(b=7)
    plan = planner(copier).plan([request("a"), request("b", 2), request("c", 1, fixed=True)], has_prompts=False)
    assert [(row.request.request_id, row.num_draft_tokens) for row in copier.rows] == [("a", K), ("b", 2)]
    assert copier.expected == pytest.approx({"a": sum(0.7**i for i in range(1, 5)), "b": 0.7 + 0.49})
    assert plan.copies == {"b": 7}
    assert plan.lengths.keys() == {"a"}


def test_copies_are_planned_in_every_round_and_no_plan_with_copies_or_without_them_is_held_for_the_other():
    copier = Copier()
    control, asked = planner(copier), [request("a"), request("b")]
    for copies in ({}, {"b": 7}, {}, {"a": 3}, {"b": 7}):
        copier.copies = copies
        plan = control.plan(asked, has_prompts=False)
        assert plan.copies == copies
        assert plan.lengths.keys() | copies.keys() == {"a", "b"}
    control.plan([request("c", 2, fixed=True)], has_prompts=False)
    assert copier.rows == []


@pytest.mark.parametrize(("mode", "most"), [("fixed", K), ("off", 0)])
def test_configured_lengths_stay(mode, most):
    control = planner(speculation=mode)
    asked, lengths = request(), set()
    for _ in range(300):
        plan = control.plan([asked], has_prompts=False)
        lengths.add((plan.length_of(asked), plan.reason))
        verdict = Verdict([5], draft=chain([7] * most))
        control.observe(plan, [row(asked, most)], [verdict], RoundSeconds(1.0, 0.5, 0.5))
    assert lengths == {(most, mode)}


@pytest.mark.parametrize(
    ("pair", "num_rows", "rate", "drift"),
    [
        (LARGE, 1, 0.3, False),
        (LARGE, 1, 0.8, True),
        (LARGE, 8, 0.6, True),
        (LARGE, 32, 0.8, False),
        (SMALL, 1, 0.6, True),
        (SMALL, 8, 0.05, True),
        (SMALL, 8, 0.95, False),
        (SMALL, 32, 0.3, True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_adaptive_is_never_much_below_the_better_of_off_and_the_best_fixed_length(pair, num_rows, rate, drift):
    """After 200 rounds, a minute or less; 10 % noise, and with drift, a machine that is half as slow again by turns."""
    simulation = Simulation(pair, [Row(rate) for _ in range(num_rows)], drift=drift)
    simulation.run(200)
    simulation.reset()
    made = simulation.run(400)
    assert made >= 0.97 * max(uniform_rate(pair, num_rows, rate, k) for k in range(9))


def test_the_draft_length_follows_the_load_and_comes_back():
    simulation = Simulation(LARGE, [Row(0.6)])
    means = []
    for num_rows in (1, 256, 1):
        simulation.resize(num_rows, Row(0.6))
        simulation.run(60)
        simulation.reset()
        simulation.run(40)
        means.append(sum(k * count for (_, k), count in simulation.reasons.items()) / 40)
    assert means[0] > 2.5
    assert means[1] < 1.5
    assert means[2] > 2.5


@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_were_rejected_long_ago_do_not_keep_those_of_others_off(seed):
    simulation = Simulation(LARGE, [], seed=seed)
    for nth in range(20):
        simulation.replace({f"bad{nth}": Row(0.01)})
        simulation.run(100)
    assert simulation.reasons["goodput", 0] > 1500
    for nth in range(10):
        if nth == 2:
            simulation.reset()
        simulation.replace({f"good{nth}": Row(0.8)})
        simulation.run(100)
    assert simulation.tokens / simulation.seconds > 0.9 * max(uniform_rate(LARGE, 1, 0.8, k) for k in range(9))


def test_rows_that_never_pay_get_none_and_cost_nothing_but_are_tried():
    rows = [Row(0.9 if i % 2 else 0.01, params=GREEDY) for i in range(16)]
    simulation = Simulation(SMALL, rows)
    simulation.run(200)
    simulation.reset()
    simulation.run(600)
    hopeless, paying = (sum(simulation.lengths[f"r{i}"] for i in range(odd, 16, 2)) / 8 / 600 for odd in (0, 1))
    assert 0 < hopeless < 0.4
    assert paying > 4


def test_one_clients_hopeless_requests_do_not_change_the_lengths_of_another():
    """Four requests beside a client's flood of the same kind, which is hopeless, or allows no drafts."""

    def lengths(others):
        rows = {f"b{i}": Row(0.8, params=GREEDY) for i in range(4)}
        simulation = Simulation(LARGE, [], seed=2)
        for nth in range(6):
            simulation.replace(rows | {f"a{nth}-{i}": others for i in range(4)})
            simulation.run(80)
        return sum(simulation.lengths[name] for name in rows)

    none = Row(0.8, params=SamplingParams(temperature=0.0, num_speculative_tokens=0))
    assert lengths(Row(0.02, params=GREEDY)) == pytest.approx(lengths(none), rel=0.15)


def test_a_mixed_load_is_faster_than_with_one_length_for_all():
    """Half the rows copy, which takes no pass of the draft; the others are prose of which few tokens are accepted."""
    copying = {f"r{i}": Row(0.95, is_copy=True) for i in range(8)}
    prose = {f"p{i}": Row(0.3) for i in range(8)}
    simulation = Simulation(LARGE, [], k=16)
    simulation.replace(copying | prose)
    simulation.run(200)
    simulation.reset()
    made = simulation.run(300)
    single = [sum(uniform_tokens(0.95, k) + uniform_tokens(0.3, k) for _ in range(8)) for k in range(17)]
    seconds = [16 * uniform_tokens(0.5, k) / uniform_rate(LARGE, 16, 0.5, k) for k in range(17)]
    assert made > 1.15 * max(tokens / time for tokens, time in zip(single, seconds, strict=True))


def uniform_tokens(rate, k):
    return sum(rate**i for i in range(k + 1))


def trained(num_rows=2):
    """A planner that knows a machine whose passes take as long as four tokens and those in it; drafting is free."""
    control = planner()
    asked = [request(f"r{i}") for i in range(num_rows)]
    for nth in range(200):
        plan = control.plan(asked, has_prompts=False)
        lengths = [nth % 5] * num_rows
        drafts = [chain([7] * n) for n in lengths]
        kept = [n // 2 for n in lengths]
        verdicts = [Verdict([5] * (1 + a), list(range(a)), draft=d) for a, d in zip(kept, drafts, strict=True)]
        seconds = 1e-3 * (4 + num_rows + sum(lengths))
        batch = [row(one, n) for one, n in zip(asked, lengths, strict=True)]
        control.observe(plan, batch, verdicts, RoundSeconds(seconds, 0.0, seconds))
    return control, asked


def test_prompts_and_drafts_share_one_budget():
    """A prompt makes the round longer, so that more draft tokens are worth their own time."""
    control, asked = trained()
    alone = control.plan(asked, has_prompts=False)
    prompt = ScheduledRow(Request("p", [1] * 60, 60, SamplingParams()), 0, 0, 50, [])
    control.observe(Plan(0), [prompt], [Verdict()], RoundSeconds(0.054, 0.0, 0.054))
    beside = control.plan(asked, has_prompts=True)
    assert sum(beside.lengths.values()) > sum(alone.lengths.values())


def test_no_trial_starts_while_prompts_are_computed():
    control, asked = trained()
    assert {control.plan(asked, has_prompts=True).reason for _ in range(500)} == {"goodput"}


def test_the_first_drafts_after_a_pause_do_not_count_for_their_time():
    """The drafter catches up with the tokens that it has missed."""
    control, asked = planner(), [request()]
    for length, draft_s in [(4, 0.1), (4, 0.001), (4, 0.001), (0, 0.0), (4, 0.1), (4, 0.001)]:
        verdict = Verdict([5], draft=chain([7] * length))
        control.observe(Plan(length), [row(asked[0], length)], [verdict], RoundSeconds(0.02, draft_s, 0.01))
    waits = [float(control.costs.seconds("none", 1, depth, 0.01)) for depth in (0, 4)]
    assert waits[1] - waits[0] == pytest.approx(0.001, rel=0.05)


def test_requests_that_allow_less_get_no_more():
    control, asked = planner(), request(length=2)
    assert max(control.plan([asked], has_prompts=False).length_of(asked) for _ in range(50)) == 2
    assert control.plan([request("none", 0)], has_prompts=False).num_draft_tokens == 0


@pytest.mark.parametrize(("limit", "lengths"), [(None, [0, K]), (0, [])])
def test_a_drafter_gets_a_prompt_before_its_first_draft_but_no_request_without_drafts(limit, lengths):
    drafter = RecordingDrafter(NoDrafter())
    engine = make_engine(TARGET, lambda _: drafter, num_speculative_tokens=K, speculation="fixed")
    run(engine, [([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True, num_speculative_tokens=limit))])
    assert drafter.lengths[:2] == lengths


class Clock:
    """Time that passes at random, so that every length looks best for a while."""

    def __init__(self):
        self.now = 0.0
        self.random = random.Random(0)

    def __call__(self):
        self.now += self.random.choice([0.1, 1.0, 5.0])
        return self.now


class RecordingDrafter:
    """Passes proposals on and notes what was asked for."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.lengths = []

    async def propose(self, rows):
        self.lengths.append(max(row.num_draft_tokens for row in rows))
        return await self.drafter.propose(rows)

    def release(self, request_id):
        self.drafter.release(request_id)


DRAFTERS = ("the target itself", "a random draft", "running ahead")


@pytest.mark.parametrize("name", DRAFTERS)
def test_coupled_text_does_not_depend_on_the_control(name):
    requests = [
        ([3, 1, 4, i % 5], SamplingParams(seed=i, max_tokens=40 + i, num_speculative_tokens=(None, None, 2, 1)[i % 4]))
        for i in range(30)
    ]
    settings = {"max_num_seqs": 2, "block_size": 4}
    engine = make_engine(TARGET, drafters(TARGET, UNLIKE)[name], speculation="adaptive", clock=Clock(), **settings)
    assert run(engine, requests) == run(make_engine(TARGET, num_speculative_tokens=0, **settings), requests)
    visited = {k for k, _ in engine.stats.num_rounds_by_length}
    assert {0, 4} < visited <= {0, 1, 2, 3, 4}


def test_samples_under_the_rejection_rule_have_the_targets_law_whatever_the_control_does():
    engine = make_engine(
        TARGET,
        chains(UNLIKE),
        speculation="adaptive",
        verification="rejection",
        num_speculative_tokens=3,
        max_num_seqs=7,
        clock=Clock(),
    )
    prompt = [3, 1, 4, 1, 0, 2, 2]
    tokens = run(engine, [(prompt, SamplingParams(seed=seed, max_tokens=3)) for seed in range(2000)])
    counts = Counter(tuple(token_ids) for token_ids in tokens.values())
    assert p_value(counts, joint_law(SamplingParams())) > 1e-5


def test_a_drafter_is_not_called_in_rounds_without_drafts():
    drafters = []

    def drafter(config):
        drafters.append(RecordingDrafter(chains(TARGET)(config)))
        return drafters[0]

    requests = [([3, 1, 4, i % 5], SamplingParams(seed=i, max_tokens=60)) for i in range(20)]
    engine = make_engine(TARGET, drafter, speculation="adaptive", max_num_seqs=2, clock=Clock())
    run(engine, requests)
    rounds = engine.stats.num_rounds_by_length
    drafted = sum(count for (k, _), count in rounds.items() if k)
    assert 0 < len(drafters[0].lengths) <= drafted < engine.stats.num_rounds_by_length.total()
    assert {reason for _, reason in rounds} == {"goodput", "trial"}
    run(make_engine(TARGET, lambda config: drafters[0], speculation="off"), requests)
    assert len(drafters[0].lengths) <= drafted
