"""Requests that fix their draft length get drafts of that length, whatever the control chooses for others.

| mutant | caught by |
|---|---|
| the scheduler caps a fixed length by the chosen one | test_a_fixed_length_is_drafted_in_every_round |
| the drafter is not called where only fixed requests want drafts | test_a_fixed_length_is_drafted_in_every_round |
| a fixed request's drafts count for the others' acceptance | test_a_fixed_length_teaches_the_control_nothing |
| rounds with a fixed request are timed, or start trials or go on with them | test_no_trial_runs_beside_a_fixed_length |
| a fixed request counts among the limits of the others | test_others_keep_the_length_that_is_chosen_for_them |
| a request that goes on here is refused for its length | test_a_request_that_goes_on_here_drafts_as_much_as_it_may |
"""

from collections import Counter

import pytest

from engine.drafting.model import ModelDrafter
from engine.errors import RequestError
from engine.sampling.params import SamplingParams
from tests.engine.running import make_engine, run, run_outputs, step
from tests.engine.test_draft_length import DRAFTERS, Clock
from tests.engine.test_exactness import TARGET, UNLIKE

K = 4


def unlike(config):
    return ModelDrafter(UNLIKE, config)


def adaptive_engine(drafter=unlike, **settings):
    settings = {"speculation": "adaptive", "num_speculative_tokens": K, "block_size": 4, **settings}
    return make_engine(TARGET, drafter, **settings)


def turn_off(engine):
    """Make the control choose no drafts, at any batch size."""
    engine.goodput._acceptance._rates = [0.0] * K
    engine.goodput._acceptance._num_reached = [1e9] * K
    for limits in ([K] * size for size in (1, 2, 4)):
        engine.goodput.choose(limits, is_measured=False)
        engine.goodput._load.use(0)


def params(length=None, *, fixed=True, max_tokens=60, **others):
    return SamplingParams(
        seed=1,
        max_tokens=max_tokens,
        ignore_eos=True,
        num_speculative_tokens=length,
        fixes_draft_length=fixed,
        **others,
    )


def lengths_of(outputs):
    """Draft lengths by how often a round had them; the last rounds of a text, which draft less, do not count."""
    lengths = Counter()
    left = sum(len(output.token_ids) for output in outputs)
    for output in outputs[1:]:
        left -= len(output.token_ids)
        if left > K:
            lengths[output.num_draft_tokens] += 1
    return lengths


@pytest.mark.parametrize("length", [1, 3, K])
def test_a_fixed_length_is_drafted_in_every_round(length):
    engine = adaptive_engine()
    turn_off(engine)
    outputs = run_outputs(engine, [([1, 2, 3], params(length))])["0"]
    assert lengths_of(outputs).keys() == {length}
    reasons = Counter()
    for (chosen, reason), count in engine.stats.num_rounds_by_length.items():
        reasons[reason] += count
        assert reason != "request" or chosen == length
    assert reasons["request"] == len(outputs) - 1  # all but that of the prompt


def test_a_fixed_length_of_0_is_plain_decoding():
    engine = adaptive_engine()
    outputs = run_outputs(engine, [([1, 2, 3], params(0))])["0"]
    assert lengths_of(outputs).keys() == {0}
    assert engine.stats.num_drafts == 0


def test_others_keep_the_length_that_is_chosen_for_them():
    engine = adaptive_engine()
    turn_off(engine)
    others = [([3, 2, 1], params(fixed=False, max_tokens=15)), ([3, 2, 2], params(2, fixed=False, max_tokens=15))]
    requests = [([1, 2, 3], params(3)), *others]
    outputs = run_outputs(engine, requests)
    assert [lengths_of(outputs[name]).keys() for name in "012"] == [{3}, {0}, {0}]


def test_a_fixed_length_teaches_the_control_nothing():
    engine = adaptive_engine(clock=Clock())
    before = engine.goodput._acceptance.gains()
    run(engine, [([1, 2, i], params(2)) for i in range(3)])
    assert engine.goodput._acceptance.gains() == before
    assert engine.goodput._loads == {}
    run(engine, [([1, 2, 3], params(2, max_tokens=200)), ([2, 2, 3], params(fixed=False, max_tokens=100))])
    assert {reason for _, reason in engine.stats.num_rounds_by_length} <= {"goodput", "request"}
    assert all(not load.recent for load in engine.goodput._loads.values())


def test_no_trial_runs_beside_a_fixed_length():
    engine = adaptive_engine(clock=Clock())
    engine.add("a", [1, 2, 3], params(fixed=False, max_tokens=300))
    while "trial" not in {reason for _, reason in engine.stats.num_rounds_by_length}:
        step(engine)
    [load] = engine.goodput._loads.values()
    engine.add("b", [3, 2, 1], params(2, max_tokens=60))
    observed_s = load._clock
    num_rounds = 0
    while not any(output.request_id == "b" and output.finish_reason for output in step(engine)):
        num_rounds += 1
        assert engine.goodput.reason == "goodput"
        assert load._clock == observed_s
    assert num_rounds > 15
    assert engine.num_running == 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_coupled_text_is_the_same_with_fixed_and_chosen_lengths(name):
    def requests(*, plain):
        lengths = (None, 1, 2, 4)
        return [
            (
                [3, 1, 4, i % 5],
                params(None if plain else lengths[i % 4], fixed=not plain and i % 4 > 0, max_tokens=30 + i),
            )
            for i in range(16)
        ]

    engine = adaptive_engine(DRAFTERS[name], clock=Clock(), max_num_seqs=3)
    plain = make_engine(TARGET, num_speculative_tokens=0, max_num_seqs=3, block_size=4)
    assert run(engine, requests(plain=False)) == run(plain, requests(plain=True))


@pytest.mark.parametrize(("settings", "most"), [({}, K), ({"speculation": "off"}, 0)], ids=["adaptive", "off"])
def test_a_fixed_length_above_the_engines_is_refused(settings, most):
    engine = adaptive_engine(**settings)
    with pytest.raises(RequestError, match=f"fixed at {most + 1}; drafts have {most} tokens at most") as refused:
        engine.add("a", [1, 2, 3], params(most + 1))
    assert refused.value.param == "num_speculative_tokens"
    assert not engine.has_work
    engine.add("b", [1, 2, 3], params(most))


def test_a_request_that_goes_on_here_drafts_as_much_as_it_may():
    """The engine that began it had longer drafts; a rollout must not end a stream."""
    engine = adaptive_engine()
    engine.add("a", [1, 2, 3], params(9), output_token_ids=[1, 2])
    outputs = []
    while engine.has_work:
        outputs += step(engine)
    assert lengths_of(outputs).keys() == {K}


def test_a_fixed_length_must_be_given():
    with pytest.raises(RequestError, match="needs num_speculative_tokens"):
        SamplingParams(fixes_draft_length=True)
