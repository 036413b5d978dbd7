"""A static pass, computed on the CPU with interpreted kernels, gives what an eager pass gives, padding or not."""

import pytest
import torch

from engine.config import BUNDLED_DRAFT
from engine.execution.batch import ForwardRow, build, next_tokens
from engine.execution.eager import EagerBackend
from engine.sampling import noise
from engine.sampling.noise import Draws
from tests.engine.tiny import model_of

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.static_pass import Outputs, Shape, StaticPass

CPU = torch.device("cpu")
BLOCKS = [*range(1, 12)]
BATCHES = {
    "one token": [ForwardRow([11], 40, BLOCKS, 1)],
    "a chain": [ForwardRow([11, 12, 13, 14, 15], 40, BLOCKS, 5)],
    "rows of different lengths": [ForwardRow([3] * 4, 5, [12], 2), ForwardRow([5, 6], 20, [13, 14], 1)],
    "a tree": [ForwardRow([3] * 4, 5, [12], 4, [-1, -1, 1]), ForwardRow([5, 6], 20, [13, 14], 2)],
}


@pytest.fixture(scope="module")
def backend():
    return EagerBackend(model_of(BUNDLED_DRAFT))


def prefilled(backend, seed):
    kv = backend.allocate_kv(20, 16)
    generator = torch.Generator().manual_seed(seed)
    for cache in (*kv.keys, *kv.values):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return kv


def static_pass(backend, kv, shape):
    vocab = backend.info.vocab_size
    outputs = Outputs(torch.empty(64, vocab), torch.empty(64, dtype=torch.int64))
    return StaticPass(backend.model, kv, shape, outputs)


def draws_for(count):
    """The first row is greedy, and two rows share a key."""
    keys = noise.keys(range(max(count - 2, 1)), range(max(count - 2, 1)), noise.TARGET_STREAM, CPU)
    rows = torch.tensor([0, *range(1, count)]).clamp(max=len(keys))
    return Draws(torch.linspace(1.0, 0.5, count).unsqueeze(-1), keys, rows)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("shape", "drawn"),
    [(Shape(2, 5, 3, 11), (0, 0, 0, 0)), (Shape(2, 5, 3, 11), (1, 1, 1, 1)), (Shape(4, 8, 4, 13), (1, 0, 0, 1))],
    ids=["tight", "tight, drawn", "padded, some drawn"],
)
def test_a_static_pass_gives_what_an_eager_pass_gives(backend, shape, drawn):
    kv, other_kv = prefilled(backend, 1), prefilled(backend, 1)
    static = static_pass(backend, kv, shape)
    for rows, is_drawn in zip(
        BATCHES.values(), drawn, strict=True
    ):  # one after the other, so that remains of the last would show
        batch, other_batch = build(rows, kv), build(rows, other_kv)
        draws = draws_for(len(batch.logit_indices)) if is_drawn else None
        static.fill(batch, draws)
        static.compute()
        output, right = static.output(batch, draws), backend.run(other_batch, draws)
        torch.testing.assert_close(output.logits, right.logits, atol=2e-4, rtol=0)
        torch.testing.assert_close(output.scores, right.scores, atol=2e-4, rtol=0)
        assert torch.equal(output.tokens, output.scores.argmax(-1))
        for cache, other in zip((*kv.keys, *kv.values), (*other_kv.keys, *other_kv.values), strict=True):
            torch.testing.assert_close(cache[1:], other[1:], atol=2e-4, rtol=0)


@torch.inference_mode()
def test_results_stay_when_the_next_pass_is_computed(backend):
    kv = prefilled(backend, 1)
    static = static_pass(backend, kv, Shape(1, 2, 0, 11))
    batch = next_tokens([BLOCKS], [40], 2, kv, 1000)
    first_batch = batch(0, torch.tensor([11]))
    static.fill(first_batch, None)
    static.compute()
    first = static.output(first_batch, None)
    before = first.logits.clone()
    static.fill(batch(1, first.tokens), None)
    static.compute()
    assert torch.equal(first.logits, before)
    assert not torch.equal(static.output(first_batch, None).logits, before)


@torch.inference_mode()
def test_logits_and_scores_are_returned_only_where_the_batch_needs_them(backend):
    kv = prefilled(backend, 1)
    static = static_pass(backend, kv, Shape(2, 5, 0, 11))
    batch, draws = build(BATCHES["a chain"], kv), draws_for(5)
    static.fill(batch, draws)
    static.compute()
    whole, batch.needs_logits = static.output(batch, draws), False
    assert torch.equal(whole.tokens, whole.scores.argmax(-1))
    output = static.output(batch, draws)
    assert torch.equal(output.tokens, whole.tokens)
    assert (len(whole.logits), len(whole.scores), len(output.logits), len(output.scores)) == (5, 5, 0, 0)
