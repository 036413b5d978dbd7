"""Shaping, row by row, against the same rules written down again without tensors."""

import random

import pytest
import torch

from engine.params import SamplingParams
from engine.protocols import Request
from engine.sampling.logits import Run, draw, needs_shaping, probabilities, shape
from tests.engine.laws import shaped_law

VOCAB = 12


def random_params(chance):
    def sometimes(value, otherwise):
        return value if chance.random() < 0.4 else otherwise

    return SamplingParams(
        temperature=chance.choice([0.0, 0.3, 0.7, 1.0, 1.8]),
        top_p=sometimes(chance.uniform(0.05, 0.99), 1.0),
        top_k=sometimes(chance.randrange(1, 15), chance.choice([0, -1])),
        min_p=sometimes(chance.uniform(0.01, 0.6), 0.0),
        repetition_penalty=sometimes(chance.uniform(0.5, 2.0), 1.0),
        presence_penalty=sometimes(chance.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(chance.uniform(-2, 2), 0.0),
        logit_bias=sometimes({chance.randrange(VOCAB): chance.uniform(-4, 4), 3: 1.5}, {}),
        min_tokens=sometimes(chance.randrange(1, 9), 0),
        seed=chance.randrange(10**6),
    )


def random_run(chance):
    params = random_params(chance)
    prompt, output = chance.randrange(1, 6), chance.randrange(6)
    committed = [chance.randrange(VOCAB) for _ in range(prompt + output)]
    paths = [[]]
    for _ in range(chance.randrange(5)):
        paths.append([*chance.choice(paths), chance.randrange(VOCAB)])
    run_paths = paths if params.has_penalties or chance.random() < 0.3 else ()
    run = Run(Request("", committed, prompt, params), [len(path) for path in paths], run_paths, (0, 7))
    return run, paths


@pytest.mark.parametrize("penalty", [1e-60, 1e-44, 1e-30])
@pytest.mark.parametrize("temperature", [1e-45, 1e-5, 1.0])
def test_tiny_parameters_leave_a_law_that_sums_to_one(temperature, penalty):
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, min_tokens=4, max_tokens=5, seed=1)
    run = Run(Request("", [3, 4, 0], 2, params), [0], [[]], (0, 7))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 50
    law = probabilities(shape(logits, [run]), [run])
    assert law.sum() == pytest.approx(1.0)
    assert law[0, [0, 7]].tolist() == [0.0, 0.0]


def test_every_row_of_a_mixed_batch_has_its_own_law():
    """Two hundred batches of chains and trees, every parameter on somewhere."""
    chance = random.Random(0)
    for _ in range(200):
        batch = [random_run(chance) for _ in range(chance.randrange(1, 6))]
        runs = [run for run, _ in batch]
        rows = [(run, path) for run, paths in batch for path in paths]
        logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(chance.randrange(10**9))) * 3
        expected = [
            shaped_law(row, run.params, [*run.request.token_ids, *path], run.request.prompt_length, run.end_ids)
            for (run, path), row in zip(rows, logits.double().tolist(), strict=True)
        ]
        actual = probabilities(shape(logits.clone(), runs), runs)
        torch.testing.assert_close(actual, torch.tensor(expected), atol=2e-6, rtol=1e-4)


def one(params, *, committed=(1, 2), prompt_length=2, depth=0, path=(), end_ids=()):
    return Run(Request("", list(committed), prompt_length, params), [depth], [list(path)], end_ids)


def test_the_noise_of_a_row_is_that_of_the_position_it_draws_for():
    """A row two tokens below the tip draws what the tip draws two tokens later."""
    params, logits = SamplingParams(seed=9), torch.zeros(1, 50)
    early = one(params, committed=[1] * 4, depth=2)
    late = one(params, committed=[1] * 6, depth=0)
    assert draw(logits, [early]).tolist() == draw(logits, [late]).tolist()
    draws = {int(draw(logits, [one(params, depth=depth)])) for depth in range(20)}
    assert len(draws) > 10


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.9},
        {"top_k": 3},
        {"min_p": 0.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"grammar": "root ::= [a-z]"},
    ],
)
def test_whatever_changes_a_logit_needs_shaping(settings):
    assert needs_shaping(SamplingParams(temperature=0.7, **settings))
    cuts = {"top_p", "top_k", "min_p"}
    assert needs_shaping(SamplingParams(temperature=0, **settings)) == (not cuts & set(settings))
