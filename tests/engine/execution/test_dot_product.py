"""Attention over gathered keys and values against a softmax that is written down token by token, in float64."""

import math

import pytest
import torch

from engine.execution.dot_product import AttentionParams, attend_to_gathered, attend_to_self

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 8, 6
SINKS = torch.tensor([-2.0, 0.0, 1.0, 20.0])
PARAMS = {
    "plain": AttentionParams(),
    "a scale": AttentionParams(scaling=0.2),
    "a soft cap": AttentionParams(softcap=1.5),
    "sinks": AttentionParams(sinks=SINKS),
    "all": AttentionParams(scaling=0.7, softcap=3.0, sinks=SINKS),
}


def expected(query, keys, values, visible, params, head):
    """One token and head: [key_dim], [places, key_dim], [places, value_dim] -> [value_dim]."""
    scale = 1 / math.sqrt(KEY_DIM) if params.scaling is None else params.scaling
    total, output = 0.0, torch.zeros(VALUE_DIM, dtype=torch.float64)
    for key, value, is_visible in zip(keys.double(), values.double(), visible, strict=True):
        score = float(query.double() @ key) * scale
        if params.softcap is not None:
            score = params.softcap * math.tanh(score / params.softcap)
        if is_visible:
            total += math.exp(score)
            output += math.exp(score) * value
    if params.sinks is not None:
        total += math.exp(params.sinks[head])
    return output / total


@pytest.mark.parametrize("name", PARAMS)
def test_each_token_gets_the_weighted_mean_of_the_values_that_it_sees(name):
    params = PARAMS[name]
    rows, length, context = 2, 3, 8
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(HEADS, rows * length, KEY_DIM, generator=generator)
    key = torch.randn(rows, context, KV_HEADS, KEY_DIM, generator=generator)
    value = torch.randn(rows, context, KV_HEADS, VALUE_DIM, generator=generator)
    visible = torch.rand(rows, length, context, generator=generator) < 0.6
    visible[..., 0] = True
    mask = torch.where(visible, 0.0, float("-inf")).unsqueeze(1).repeat(1, 1, HEADS // KV_HEADS, 1)
    output = attend_to_gathered(rows, length, query, key, value, mask, params)
    assert output.shape == (rows * length, HEADS, VALUE_DIM)
    for row in range(rows):
        for token in range(length):
            for head in range(HEADS):
                keys, values = key[row, :, head // 2], value[row, :, head // 2]
                place = row * length + token
                right = expected(query[head, place], keys, values, visible[row, token], params, head)
                torch.testing.assert_close(output[place, head].double(), right, atol=1e-5, rtol=0)


def test_a_prompt_attends_to_itself_causally():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(HEADS, 5, KEY_DIM, generator=generator)
    key = torch.randn(KV_HEADS, 5, KEY_DIM, generator=generator)
    value = torch.randn(KV_HEADS, 5, VALUE_DIM, generator=generator)
    output = attend_to_self(query, key, value, 0.3)
    for token in range(5):
        for head in range(HEADS):
            visible = [place <= token for place in range(5)]
            right = expected(
                query[head, token], key[head // 2], value[head // 2], visible, AttentionParams(scaling=0.3), head
            )
            torch.testing.assert_close(output[token, head].double(), right, atol=1e-5, rtol=0)


def test_only_caps_and_sinks_need_more_than_torchs_operator():
    assert AttentionParams(window=3, scaling=0.1).is_plain
    assert not AttentionParams(softcap=1.0).is_plain
    assert not AttentionParams(sinks=SINKS).is_plain
