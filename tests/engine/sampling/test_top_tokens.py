"""top_k and top_p keep what a full sort keeps."""

import math
import random

import pytest
import torch

from engine.params import SamplingParams
from engine.protocols import Request
from engine.sampling.logits import Run, probabilities, shape
from engine.sampling.top_tokens import top


@pytest.mark.parametrize("top_p", [1e-6, 1e-60])
def test_top_p_never_leaves_a_row_empty(top_p):
    run = Run(Request("", [1], 1, SamplingParams(top_p=top_p)), [0])
    assert probabilities(shape(torch.tensor([[0.0, 2.0, 1.0]]), [run]), [run]).tolist() == [[0, 1, 0]]


def test_small_probabilities_add_up_in_any_order():
    """In float32 they would be lost one by one after a large one, and kept if added before; GPUs do either."""
    logits = torch.full((1, 101), -26.0).mul(math.log(2.0))
    logits[0, 0] = 0.0
    enough = logits.softmax(-1)[:, :1] + 2.0**-23
    kept, _ = top(logits, torch.tensor([[101]]), enough, 101)
    assert kept.isfinite().sum() in (1 + 8, 1 + 9)


def kept_by_sorting(row, top_k, top_p):
    """The rule, token by token, over a stable sort."""
    order = sorted(range(len(row)), key=lambda i: -row[i])[: top_k or None]
    weights = torch.tensor([row[i] for i in order], dtype=torch.float64).softmax(-1).tolist()
    kept, before = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if top_p < 1 and before >= top_p:
            break
        kept.add(token)
        before += weight
    return kept


@pytest.mark.parametrize("reads_cheaply", [True, False])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 4.0])
def test_searching_the_likeliest_tokens_keeps_what_a_full_sort_keeps(scale, reads_cheaply, monkeypatch):
    """A large vocabulary with many equal logits; flat rows need more tokens than are looked among first."""
    monkeypatch.setattr("engine.sampling.top_tokens._reads_cheaply", lambda _: reads_cheaply)
    chance = random.Random(5)
    generator = torch.Generator().manual_seed(6)
    vocab = 1000
    for _ in range(8):
        params = [
            SamplingParams(
                temperature=1.0,
                top_p=chance.choice([1.0, 0.3003, 0.7007, 0.98765]),
                top_k=chance.choice([0, 0, 1, 40, 300, 2000]),
            )
            for _ in range(5)
        ]
        runs = [Run(Request("", [1], 1, row_params), [0]) for row_params in params]
        logits = (torch.randn(5, vocab, generator=generator) * scale * 8).round() / 8
        actual = shape(logits.clone(), runs)
        for i, row_params in enumerate(params):
            top_k = row_params.top_k if row_params.top_k < vocab else 0
            kept = kept_by_sorting(logits[i].tolist(), top_k, row_params.top_p)
            assert {token for token in range(vocab) if actual[i, token] > float("-inf")} == kept
            assert torch.equal(actual[i], shape(logits[i : i + 1].clone(), runs[i : i + 1])[0])
