"""Requests beyond a model's limits are refused by name, value and limit; parameters are cut to what fits."""

import pytest

from engine.config import EngineConfig, ModelInfo
from engine.errors import RequestError
from engine.params import SamplingParams
from engine.requests.limits import RequestLimits


def limits(*, num_blocks=41, start_id=None, **settings):
    info = ModelInfo("tiny", 50, 100, [1], 1, "float32", "cpu", start_id=start_id)
    return RequestLimits(EngineConfig(block_size=4, **settings), info, num_blocks)


@pytest.mark.parametrize(
    ("made", "prompt", "params", "message"),
    [
        ({}, [], {}, "the prompt is empty"),
        ({}, [2] * 100, {}, "the prompt has 100 tokens; the context of 100 must also hold one output token"),
        ({"num_blocks": 3}, [2] * 8, {}, "the prompt has 8 tokens; the KV cache holds 8"),
        (
            {"start_id": 0, "max_num_batched_tokens": 9},
            [2] * 10,
            {},
            "the prompt has 10 tokens; one pass must compute it, and max_num_batched_tokens is 9",
        ),
        ({}, [2] * 90, {"min_tokens": 11, "max_tokens": 12}, "min_tokens is 11; the context has room for 10"),
        ({}, [2, 50], {}, "prompt contains token id 50; ids are 0 to 49"),
        ({}, [2], {"stop_token_ids": [51]}, "stop_token_ids contains token id 51; ids are 0 to 49"),
        ({}, [2], {"logit_bias": {77: 1.0}}, "logit_bias contains token id 77; ids are 0 to 49"),
        (
            {"num_speculative_tokens": 3},
            [2],
            {"num_speculative_tokens": 4, "fixes_draft_length": True},
            "num_speculative_tokens is fixed at 4; drafts have 3 tokens at most",
        ),
    ],
)
def test_a_request_beyond_a_limit_is_refused(made, prompt, params, message):
    with pytest.raises(RequestError) as raised:
        limits(**made).fit(prompt, SamplingParams(**params), is_new=True)
    assert str(raised.value) == message


def test_parameters_are_cut_to_what_fits():
    fitted = limits(num_speculative_tokens=3).fit(
        [2] * 90, SamplingParams(max_tokens=50, seed=7, num_speculative_tokens=9), is_new=True
    )
    assert (fitted.max_tokens, fitted.num_speculative_tokens, fitted.seed) == (10, 3, 7)
    assert limits(num_blocks=3).fit([2] * 5, SamplingParams(max_tokens=50), is_new=True).max_tokens == 3
    # A start token takes a place of the cache, and one of the context.
    assert limits(num_blocks=3, start_id=0).fit([2] * 5, SamplingParams(max_tokens=50), is_new=True).max_tokens == 2
    assert limits(start_id=0).max_model_len == 99


def test_a_request_without_a_seed_gets_one_of_its_own():
    seeds = {limits().fit([2], SamplingParams(), is_new=True).seed for _ in range(3)}
    assert len(seeds) == 3
    assert None not in seeds


def test_a_resumed_request_keeps_its_fixed_length_as_far_as_possible_and_gets_no_prompt_logprobs_again():
    params = SamplingParams(num_speculative_tokens=4, fixes_draft_length=True, prompt_logprobs=1)
    fitted = limits(num_speculative_tokens=3).fit([2], params, is_new=False)
    assert (fitted.num_speculative_tokens, fitted.prompt_logprobs) == (3, None)
    assert limits().fit([2], SamplingParams(prompt_logprobs=1), is_new=True).prompt_logprobs == 1
