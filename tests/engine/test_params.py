"""Which parameters are refused, and by which name."""

from dataclasses import fields
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        ({"top_p": 0.0}, "top_p", "above 0"),
        ({"top_p": 1.01}, "top_p", "1.01"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "above 0"),
        ({"repetition_penalty": 100.5}, "repetition_penalty", "100.5"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"min_tokens": 17}, "min_tokens", "max_tokens only 16"),
        ({"logit_bias": {5: 100.1}}, "logit_bias", "{5: 100.1}, allowed are numbers from -100 to 100, by token id"),
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


def test_a_temperature_that_is_lost_in_rounding_is_greedy():
    assert SamplingParams(temperature=1e-45).temperature == 0
    assert SamplingParams(temperature=1e-5).temperature == 1e-5


def test_none_and_other_ways_to_say_the_same() -> None:
    plain = SamplingParams()
    nothing = SamplingParams(**dict.fromkeys(setting.name for setting in fields(plain)))
    assert nothing == SamplingParams(max_tokens=2**31 - 1)
    assert SamplingParams(stop="\n") == SamplingParams(stop=("\n",)) == SamplingParams(stop=["\n"])
    assert SamplingParams(stop="", stop_token_ids=(), logit_bias={}) == plain
    array = SamplingParams(seed=numpy.int64(3), temperature=numpy.float32(0.5), stop_token_ids=[numpy.int32(7)])
    assert [type(value) for value in (array.seed, array.temperature, array.stop_token_ids[0])] == [int, float, int]
    assert array == SamplingParams(seed=3, temperature=0.5, stop_token_ids=[7])


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text() | st.binary() | st.just(1j),
    lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text(), inner) | st.tuples(inner),
    max_leaves=4,
)


@given(name=st.sampled_from([setting.name for setting in fields(SamplingParams)]), value=_anything)
def test_a_wrong_value_is_refused_in_one_sentence_and_none_raises_another_error(name: str, value: Any) -> None:
    error = None
    try:
        SamplingParams(**{name: value})
    except RequestError as raised:
        error = raised
    is_text = isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(it, str) for it in value))
    if value is not None and name != "stop" and is_text and value and name != "grammar":
        assert error is not None
    if error is not None and error.param == name:
        assert str(error).startswith(name)
        assert "allowed are" in str(error) or "must be above 0" in str(error) or "empty" in str(error)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("logprobs", True, "whole numbers from 0 to 20"),
        ("top_k", 1.5, "whole numbers from -1"),
        ("temperature", "hot", "0.0 to 100.0"),
        ("ignore_eos", 1, "True and False"),
        ("stop", [1], "a text and a list of texts"),
        ("stop_token_ids", [True], "lists of token ids"),
        ("logit_bias", {"5": 1}, "by token id"),
        ("logit_bias", {5: -100.5}, "from -100 to 100"),
        ("logit_bias", [5], "by token id"),
        ("grammar", 5, "texts"),
    ],
)
def test_wrong_types(name: str, value: Any, allowed: str) -> None:
    error = refusal(**{name: value})
    assert str(error).startswith(f"{name} is {value!r}, allowed are ")
    assert allowed in str(error)
