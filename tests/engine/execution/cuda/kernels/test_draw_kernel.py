"""The Triton kernels that draw, interpreted on the CPU: the noise of `engine.sampling.noise`, and the tokens of it."""

import numpy as np
import pytest
import torch

from engine.sampling import noise

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.kernels import draw_kernel

CPU = torch.device("cpu")


def kahan(uniform):
    rest = 1 - uniform
    with np.errstate(divide="ignore", invalid="ignore"):
        exponential = np.log(rest) * (uniform / (rest - 1))
    return -np.log(np.where(rest == 1, uniform, exponential))


@pytest.mark.parametrize(("count", "vocab"), [(1, 5), (3, 2500), (0, 10)])
def test_noise_is_that_of_the_hash_and_as_plain_as_rounding_lets_it(count, vocab):
    keys = noise.keys(range(count), range(7, 7 + count), noise.TARGET_STREAM, CPU)
    token_ids = torch.arange(vocab, dtype=torch.int32)
    gumbel = draw_kernel.gumbel(keys, token_ids)
    assert torch.equal(gumbel, torch.from_numpy(kahan(noise.uniform(keys, token_ids).numpy())))
    torch.testing.assert_close(gumbel, noise.plain_gumbel(keys, token_ids), atol=1e-6, rtol=1e-6)


def test_the_largest_hashes_stay_finite_and_the_smallest_exact():
    """Of 2^31 hashes, the last 128 would round to 1; below 2^-25, 1 minus a hash rounds to 1."""
    keys = torch.tensor([[0, 0]], dtype=torch.int32)
    token_ids = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int32)
    token_ids[0] = 0  # whose hash is 0
    torch.testing.assert_close(
        draw_kernel.gumbel(keys, token_ids), noise.plain_gumbel(keys, token_ids), atol=2e-6, rtol=1e-6
    )


def arguments(count, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(count, 2 * vocab, generator=generator)[:, :vocab]  # rows are not contiguous
    keys = noise.keys(range(count), range(7, 7 + count), noise.TARGET_STREAM, CPU)
    return logits, torch.rand(count, generator=generator) + 0.1, keys, torch.arange(count) % 3


@pytest.mark.parametrize("vocab", [5, 1024, 2500])
def test_tokens_are_the_argmax_of_the_noised_logits_bit_by_bit(vocab, monkeypatch):
    logits, temperatures, keys, is_drawn = arguments(7, vocab)
    monkeypatch.setitem(noise.IMPLEMENTATIONS, "cpu", draw_kernel.gumbel)
    drawn = torch.where(is_drawn > 0, torch.arange(1, 8), 0)
    ones = torch.where(is_drawn > 0, temperatures, 1.0).unsqueeze(-1)
    scores = noise.noised_logits(logits, noise.Draws(ones, keys, drawn))
    tokens = draw_kernel.draw(logits, temperatures, keys, is_drawn.int())
    assert torch.equal(tokens, scores.argmax(-1))
    assert torch.equal(tokens[::3], logits[::3].argmax(-1))


def test_ties_go_to_the_lowest_id_within_and_over_tiles():
    logits = torch.zeros(4, 3000)
    logits[1, [1023, 1024, 2900]] = 1.0
    logits[2, [2047, 2046, 2048]] = 1.0
    logits[3] = float("-inf")
    zeros = torch.zeros(4, 2, dtype=torch.int32)
    assert draw_kernel.draw(logits, torch.ones(4), zeros, zeros[:, 0]).tolist() == [0, 1023, 2046, 0]
    nothing = torch.full((2, 9), float("nan"))
    assert draw_kernel.draw(nothing, torch.ones(2), zeros[:2], zeros[:2, 0]).tolist() == [0, 0], "ids that exist"
    assert draw_kernel.draw(torch.empty(0, 9), torch.ones(0), zeros[:0], zeros[:0, 0]).tolist() == []
