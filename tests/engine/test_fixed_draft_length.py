"""Requests that fix their draft length get drafts of that length, whatever the control chooses for others."""

from collections import Counter

import numpy as np
import pytest

from engine.errors import RequestError
from engine.params import SamplingParams
from tests.engine.running import drafters, make_engine, run_outputs, step
from tests.engine.test_exactness import TARGET, UNLIKE

K = 4


def adaptive_engine(name="a random draft", **settings):
    settings = {"speculation": "adaptive", "num_speculative_tokens": K, "block_size": 4, **settings}
    return make_engine(TARGET, drafters(TARGET, UNLIKE)[name], **settings)


def turn_off(engine):
    """Make the control choose no drafts: all are hopeless."""
    engine.planner.survival.chances = lambda histories, length: np.zeros((len(histories), length))


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


@pytest.mark.parametrize("length", [0, 3, K])
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


def test_others_keep_the_length_that_is_chosen_for_them():
    engine = adaptive_engine()
    turn_off(engine)
    others = [([3, 2, 1], params(fixed=False, max_tokens=15)), ([3, 2, 2], params(2, fixed=False, max_tokens=15))]
    requests = [([1, 2, 3], params(3)), *others]
    outputs = run_outputs(engine, requests)
    assert [lengths_of(outputs[name]).keys() for name in "012"] == [{3}, {0}, {0}]


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
