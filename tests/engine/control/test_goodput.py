"""The control of the draft length: its choices over a model of costs, and the engine's text, which must not notice."""

import random
from collections import Counter

import pytest

from engine.control.acceptance import ChainAcceptance
from engine.control.goodput import Goodput
from engine.laws import p_value
from engine.params import SamplingParams
from tests.engine.running import chains, drafters, make_engine, run
from tests.engine.test_exactness import TARGET, UNLIKE, joint_law

MAX_K = 4
MEMORY_BOUND = {"draft": 0.2, "row": 0.02, "fixed": 1.0}
CHEAP_DRAFT = {"draft": 0.05, "row": 0.001, "fixed": 1.0}
COMPUTE_BOUND = {"draft": 0.3, "row": 0.3, "fixed": 1.0}


def adaptive(max_draft_tokens=MAX_K, speculation="adaptive"):
    return Goodput(max_draft_tokens, ChainAcceptance(max_draft_tokens), speculation)


class Machine:
    """Rounds whose times follow a formula, on a machine that others use too.

    Single rounds take -20 % to +60 % of that, and some hundred in a row all take 1.4 times as long.
    """

    def __init__(self, *, draft, row, fixed, acceptance, seed=1, most=MAX_K):
        self.draft, self.row, self.fixed, self.acceptance = draft, row, fixed, acceptance
        self.random = random.Random(seed)
        self.most = most
        self.lengths = Counter()
        self.num_rounds = 0

    def round_s(self, batch_size, k):
        return k * self.draft + self.fixed + self.row * batch_size * (1 + k)

    def rate(self, batch_size, k):
        """Tokens per second with this length in every round, in expectation."""
        return batch_size * sum(self.acceptance**i for i in range(k + 1)) / self.round_s(batch_size, k)

    def run(self, control, batch_size, num_rounds, *, is_measured=lambda _: True, limit=None):
        """Return the tokens per second that these rounds made, noise apart."""
        tokens = elapsed = 0.0
        limits = [self.most if limit is None else limit] * batch_size
        for _ in range(num_rounds):
            self.num_rounds += 1
            measured = is_measured(self.num_rounds)
            k, _ = control.choose(limits, is_measured=measured)
            self.lengths[k] += 1
            for _ in range(batch_size):
                accepted = next((i for i in range(k) if self.random.random() > self.acceptance), k)
                control.acceptance.observe(k, range(accepted))
                tokens += 1 + accepted
            elapsed += self.round_s(batch_size, k)
            if measured:
                neighbour = 1.4 if self.num_rounds // 150 % 2 else 1.0
                noise = self.random.uniform(0.8, 1.6) * neighbour
                control.observe(limits, self.round_s(batch_size, k) * noise)
        return tokens / elapsed


@pytest.mark.parametrize("batch_size", [1, 4, 32])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("costs", [MEMORY_BOUND, CHEAP_DRAFT, COMPUTE_BOUND], ids=["memory", "cheap draft", "compute"])
def test_adaptive_is_never_much_below_the_better_of_off_and_fixed(batch_size, acceptance, costs):
    machine = Machine(**costs, acceptance=acceptance)
    made = machine.run(adaptive(), batch_size, 3000)
    assert made >= 0.95 * max(machine.rate(batch_size, 0), machine.rate(batch_size, MAX_K))


@pytest.mark.parametrize("seed", range(5))
def test_drafts_that_were_rejected_long_ago_do_not_keep_those_of_others_off(seed):
    """Requests whose drafts are rejected, then others: as many rounds as 20 requests one by one have, several times."""
    machine = Machine(draft=0.3, row=0.02, fixed=1.0, acceptance=0.05, seed=seed)
    control = adaptive()
    machine.run(control, 1, 6000)
    machine.acceptance = 0.7
    made = machine.run(control, 1, 2000)
    assert made >= 0.9 * max(machine.rate(1, k) for k in range(MAX_K + 1))


def test_trials_cost_little_when_the_load_flickers_over_a_border():
    machine = Machine(**COMPUTE_BOUND, acceptance=0.3)
    control = adaptive()
    rates = [machine.run(control, size, 3) for _ in range(800) for size in (8, 9)]
    off = [machine.rate(batch_size, 0) for batch_size in (8, 9)]
    assert sum(rates) / len(rates) > 0.95 * sum(off) / 2


def test_the_draft_length_follows_the_load_and_comes_back():
    machine = Machine(draft=0.05, row=0.2, fixed=10.0, acceptance=0.7)
    control = adaptive()
    means = []
    for batch_size in (1, 64, 1):
        machine.run(control, batch_size, 300)
        machine.lengths.clear()
        machine.run(control, batch_size, 1000)
        means.append(sum(k * count for k, count in machine.lengths.items()) / 1000)
    assert means[0] > 3
    assert means[1] < 1.5  # 1 is best there
    assert means[2] > 3


def test_requests_that_allow_less_get_the_best_of_that():
    machine = Machine(**CHEAP_DRAFT, acceptance=0.9)
    machine.run(adaptive(), 4, 2000, limit=2)
    assert set(machine.lengths) == {0, 1, 2}
    assert machine.lengths[2] > 1500
    none = Machine(**CHEAP_DRAFT, acceptance=0.9)
    none.run(adaptive(), 4, 100, limit=0)
    assert none.lengths == {0: 100}


def test_no_trial_starts_while_prompts_are_computed():
    machine = Machine(**CHEAP_DRAFT, acceptance=0.9)
    control = adaptive()
    machine.run(control, 1, 500, is_measured=lambda _: False)
    assert machine.lengths == {MAX_K: 500}


def test_a_long_draft_is_found_without_trying_every_length():
    machine = Machine(draft=0.01, row=0.001, fixed=1.0, acceptance=0.95, most=64)
    machine.run(adaptive(64), 1, 3000)
    made = sum(machine.rate(1, k) * count for k, count in machine.lengths.items()) / 3000
    assert made > 0.93 * max(machine.rate(1, k) for k in range(65))
    assert len(machine.lengths) < 9


@pytest.mark.parametrize(("mode", "lengths"), [("fixed", {MAX_K}), ("off", {0})])
def test_configured_lengths_stay(mode, lengths):
    machine = Machine(**COMPUTE_BOUND, acceptance=0.1)
    control = adaptive(max(lengths), mode)
    machine.run(control, 8, 500)
    assert set(machine.lengths) == lengths
    assert control.choose([MAX_K], is_measured=True) == (max(lengths), mode)


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
    assert visited == {0, 1, 2, 3, 4}


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


@pytest.mark.parametrize("slowdown", [3.0, 1 / 3])
def test_a_trial_is_not_compared_with_rounds_of_long_ago(slowdown):
    """Interrupted by another load, on a machine whose speed changes meanwhile."""
    control = adaptive()

    def rounds(count, limits, speed):
        for _ in range(count):
            length, reason = control.choose(limits, is_measured=True)
            control.observe(limits, 0.01 * (1 + 0.1 * length) * speed)
        return reason

    while rounds(1, [MAX_K], 1.0) != "trial":
        pass
    rounds(1, [MAX_K], 1.0)  # one that counts: a hopeless trial ends after three
    challenger = control.num_draft_tokens
    rounds(50, [MAX_K] * 3, slowdown)
    rounds(60, [MAX_K], slowdown)
    cost = control._loads[(0, MAX_K)].costs.get(challenger)
    assert cost is None or cost == pytest.approx((1 + 0.1 * challenger) / (1 + 0.1 * MAX_K), rel=0.01)


def test_a_trial_pauses_while_prompts_are_computed():
    control = adaptive()
    while control.choose([MAX_K], is_measured=True)[1] != "trial":
        control.observe([MAX_K], 1.0)
    control.observe([MAX_K], 1.0)
    challenger = control.num_draft_tokens
    assert control.choose([MAX_K], is_measured=False) == (MAX_K, "goodput")
    assert control.choose([MAX_K], is_measured=True) == (challenger, "trial")


def test_a_new_batch_size_begins_with_the_length_of_the_nearest():
    control = adaptive()
    for batch_size, best in ((1, MAX_K), (8, 0)):
        control.choose([MAX_K] * batch_size, is_measured=False)
        control._load.use(best)
    assert control.choose([MAX_K] * 16, is_measured=False)[0] == 0
    assert control.choose([MAX_K] * 2, is_measured=False)[0] == MAX_K


def test_one_outlier_does_not_change_the_cost_of_a_length():
    control = adaptive(1)
    control.choose([1], is_measured=True)
    (load,) = control._loads.values()
    for cost in (2.0, 2.0, 9.0, 2.0):
        load.recent.extend([1.0] * 8)
        load.challenge()
        while load.trial is not None:
            load.observe_trial(load.trial, cost, 1.0)
        load._due.clear()
        assert load.costs[0] == 2.0


def test_an_abandoned_length_is_not_tried_again_at_once():
    control = adaptive(1)
    control.choose([1], is_measured=True)
    (load,) = control._loads.values()

    def rounds(count):
        for _ in range(count):
            load.observe(1.0, is_first=False)
        load.challenge()
        return load.trial

    rounds(8)
    load.trial = None
    load.use(0)
    assert rounds(8) is None
    assert rounds(30) is not None


def test_a_draft_counts_up_to_its_requests_limit():
    control = adaptive(3)
    for _ in range(1000):
        control.acceptance.observe(3, [0])
    assert control.expected_tokens(3, [3, 0]) == pytest.approx(3, abs=0.02)
