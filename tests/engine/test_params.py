"""Which parameters are refused, and by which name."""

import math

import pytest

from engine.errors import RequestError
from engine.params import MAX_SEED, SamplingParams

RANGES = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), MAX_SEED),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "num_speculative_tokens": (0, 64),
    "n": (1, 128),
}


def refusal(**settings):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**settings)
    return caught.value


@pytest.mark.parametrize("name", RANGES)
def test_a_value_outside_its_range_is_refused_by_name_and_both_ends_are_allowed(name):
    low, high = RANGES[name]
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (low - 1, high + 1):
        error = refusal(**{name: value})
        assert error.param == name
        assert str(value) in str(error)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_infinite_and_nan_values_are_refused(name, value):
    assert refusal(**{name: value}).param == name


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        ({"top_p": 0.0}, "top_p", "above 0"),
        ({"top_p": 1.01}, "top_p", "1.01"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "above 0"),
        ({"repetition_penalty": 100.5}, "repetition_penalty", "100.5"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"min_tokens": 17}, "min_tokens", "max_tokens only 16"),
        ({"logit_bias": {5: 100.1}}, "logit_bias", "token 5 is 100.1"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"grammar": "{}", "min_tokens": 1}, "min_tokens", "grammar"),
        ({"grammar": "{}", "ignore_eos": True}, "ignore_eos", "grammar"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_contradicting_parameters_are_refused(settings, param, message):
    error = refusal(**settings)
    assert error.param == param
    assert message in str(error)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_makes_a_row_depend_on_the_draft_above_it(name):
    assert not SamplingParams().depends_on_path
    assert SamplingParams(**{name: 0.5}).depends_on_path
    assert SamplingParams(**{name: 0.5}).has_penalties


def test_a_grammar_makes_a_row_depend_on_the_draft_above_it_and_is_no_penalty():
    params = SamplingParams(grammar="{}")
    assert params.depends_on_path
    assert not params.has_penalties


def test_a_temperature_that_is_lost_in_rounding_is_greedy():
    assert SamplingParams(temperature=1e-45).temperature == 0
    assert SamplingParams(temperature=1e-5).temperature == 1e-5
