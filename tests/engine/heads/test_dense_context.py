"""Attention over whole texts, against a softmax that is written out."""

import pytest
import torch

from engine.heads.dense_context import DenseContext
from engine.models.layers.layer_attention import AttentionParams

LENGTH, HEADS, DIM = 7, 2, 4


def tensors(*shape):
    return torch.randn(*shape, HEADS, DIM, generator=torch.Generator().manual_seed(sum(shape)))


def flat(tensor):
    return tensor.reshape(-1, HEADS, DIM).transpose(0, 1)


@pytest.mark.parametrize(
    "params", [AttentionParams(first=1), AttentionParams(sees_row=True), AttentionParams(window=3)]
)
def test_a_draft_sees_the_context_before_its_start_and_its_own_places(params):
    keys, starts = tensors(1, LENGTH), torch.tensor([[2, 5]])
    context = DenseContext(torch.randn(1, LENGTH, 3))
    context.write(0, flat(keys), flat(2 * keys))
    context.begin(starts)
    own = tensors(1, 2, 3)
    output = context.attend(0, flat(own), flat(own), flat(2 * own), params).view(1, 2, 3, HEADS, DIM)
    for index, start in enumerate([2, 5]):
        seen_keys = torch.cat([keys[0, :start], own[0, index]])
        for place in range(3):
            at = start + place
            end = start + 3 if params.sees_row else at + 1
            places = range(max(params.first, at + 1 - params.window if params.window else 0), end)
            seen = seen_keys[list(places)]
            weights = (torch.einsum("hd,khd->hk", own[0, index, place], seen) / DIM**0.5).softmax(-1)
            expected = torch.einsum("hk,khd->hd", weights, 2 * seen)
            torch.testing.assert_close(output[0, index, place], expected, rtol=1e-4, atol=1e-5)


def test_states_are_those_of_the_token_before_until_a_pass_writes_its_own():
    features = torch.arange(8.0).view(2, 4, 1)
    context = DenseContext(features)
    assert context.read_states(of_parents=False).flatten().tolist() == list(range(8))
    assert context.read_states(of_parents=True).view(2, 4)[:, 1:].tolist() == [[0, 1, 2], [4, 5, 6]]
    context.begin(torch.tensor([[1, 3], [2, 3]]))
    assert context.read_states(of_parents=True).flatten().tolist() == [0, 2, 5, 6]
    context.write_states(torch.ones(4, 1))
    assert context.read_states(of_parents=True).flatten().tolist() == [1] * 4
