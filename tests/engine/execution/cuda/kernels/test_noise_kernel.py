"""The Triton hash, interpreted on the CPU, is the hash of `engine.sampling.noise`."""

import pytest
import torch

from engine.sampling import noise

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.kernels import noise_kernel

CPU = torch.device("cpu")


@pytest.mark.parametrize(("count", "vocab"), [(1, 5), (3, 2500), (0, 10)])
def test_noise_is_equal_bit_by_bit(count, vocab):
    keys = noise.keys(range(count), range(7, 7 + count), noise.TARGET_STREAM, CPU)
    token_ids = torch.arange(vocab, dtype=torch.int32)
    assert torch.equal(noise_kernel.uniform(keys, token_ids), noise.uniform(keys, token_ids))
    assert torch.equal(noise_kernel.gumbel(keys, token_ids), noise.plain_gumbel(keys, token_ids))


def test_the_largest_hashes_stay_below_one():
    """Of 2^31 hashes, the last 128 would round to 1."""
    keys = torch.tensor([[0, 0]], dtype=torch.int32)
    token_ids = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int32)
    assert torch.equal(noise_kernel.uniform(keys, token_ids), noise.uniform(keys, token_ids))
