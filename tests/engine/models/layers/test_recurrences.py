"""Recurrences: steps and chunks are transformers' own, and no bit depends on other tokens of a pass."""

import math

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from engine.models.layers.layer_state import updated
from engine.models.layers.recurrences import GatedDelta, Mamba2

TOKENS, CHUNK, HEADS = 150, 64, 4


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + math.prod(shape)))


def make_mamba2(limits=(0.2, 0.7)):
    parameters = [-numbers(HEADS).exp(), numbers(HEADS, seed=1), numbers(HEADS, seed=2)]
    return Mamba2(nemotron.mamba2_chunk_scan, CHUNK, *parameters, limits)


KEY_HEADS = 2 if "num_k_heads" in qwen.torch_chunk_gated_delta_rule.__wrapped__.__code__.co_varnames else HEADS
"""Older versions of transformers repeat keys before they call the function."""
DELTA = [numbers(TOKENS, KEY_HEADS, 8), numbers(TOKENS, KEY_HEADS, 8, seed=1), numbers(TOKENS, HEADS, 6)]
BETA = numbers(TOKENS, HEADS).sigmoid()
CASES = {
    "per head": (
        GatedDelta(qwen.torch_chunk_gated_delta_rule),
        [*DELTA, -numbers(TOKENS, HEADS, seed=3).exp(), BETA],
    ),
    "per channel": (
        GatedDelta(kimi.chunk_kimi_delta_attention),
        [
            *(x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in DELTA[:2]),
            DELTA[2],
            -numbers(TOKENS, HEADS, 8).exp(),
            BETA,
        ],
    ),
    "Mamba 2": (
        make_mamba2(),
        [numbers(TOKENS, HEADS, 6), numbers(TOKENS, HEADS), numbers(TOKENS, 2, 8), numbers(TOKENS, 2, 8, seed=1)],
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def first_state(recurrence, inputs, seed=7):
    return numbers(*recurrence.sizes(inputs)[:3], seed=seed)


def steps(recurrence, state, inputs) -> tuple[Tensor, Tensor]:
    """Contexts [n, heads, rows, columns], each with its own inputs [n, tokens, ...], one token after the other."""
    outputs = []
    for token in range(inputs[0].shape[1]):
        entry = [part[:, token] for part in inputs]
        state = updated(state, recurrence.update(state, entry))
        outputs.append(recurrence.output(state, entry))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("format", [torch.float32, torch.bfloat16])
def test_no_bit_of_a_step_depends_on_other_rows_or_on_how_many_tokens_follow(case, format):
    recurrence, inputs = case
    inputs = [part[:15].to(format) for part in inputs]
    states = torch.stack([first_state(recurrence, inputs, seed) for seed in range(3)])
    rows = [part.view(3, 5, *part.shape[1:]) for part in inputs]
    expected, last = steps(recurrence, states, rows)
    for row in range(3):
        state = states[row : row + 1]
        for first, end in ((0, 1), (1, 3), (3, 5)):
            output, state = steps(recurrence, state, [part[row : row + 1, first:end] for part in rows])
            assert torch.equal(output[0], expected[row, first:end])
        assert torch.equal(state[0], last[row])


@pytest.mark.parametrize("split", [CHUNK, 2 * CHUNK])
def test_a_prompt_split_at_a_chunk_has_the_same_bits(case, split):
    recurrence, inputs = case
    state = first_state(recurrence, inputs)
    expected, last = recurrence.scan(state, inputs)
    first, state = recurrence.scan(state, [part[:split] for part in inputs])
    second, state = recurrence.scan(state, [part[split:] for part in inputs])
    assert torch.equal(torch.cat([first, second]), expected)
    assert torch.equal(state, last)


def test_time_steps_keep_within_their_limits_in_both_forms():
    inputs = CASES["Mamba 2"][1]
    state = first_state(make_mamba2(), inputs)
    bounded, free = make_mamba2((0.6, 0.7)), make_mamba2((0.0, float("inf")))
    for compute in (
        lambda one: one.scan(state, inputs)[0],
        lambda one: one.update(state[None], [x[:1] for x in inputs])[0],
    ):
        assert (compute(bounded) - compute(free)).abs().max() > 0.1
    decays = bounded.update(state[None], [part[:1] for part in inputs]).decay
    steps_taken = decays.log() / bounded.a[:, None]
    assert ((steps_taken > 0.599) & (steps_taken < 0.701)).all()
