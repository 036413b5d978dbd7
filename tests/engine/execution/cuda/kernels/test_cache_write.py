"""The kernel that writes to caches, interpreted on the CPU."""

import pytest
import torch

from tests.engine.execution.cuda.kernels.test_triton_attention import context

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.kernels import cache_write


def test_keys_and_values_are_written_to_their_slots():
    kv = context(4, 3, 24, 10)
    before = kv.keys[0].clone(), kv.values[0].clone()
    key, value = torch.randn(3, 3, 24), torch.randn(3, 3, 10).transpose(0, 1)
    slots = torch.tensor([5, 40, 17])
    cache_write.write(key, value, kv.keys[0], kv.values[0], slots)
    for cache, old, new in zip((kv.keys[0], kv.values[0]), before, (key, value), strict=True):
        old.view(-1, *old.shape[2:])[slots] = new.transpose(0, 1)
        assert torch.equal(cache, old)


def test_fp8_caches_hold_the_nearest_numbers_and_saturate():
    numbers = torch.cat([torch.randn(40) * 10.0**power for power in range(-4, 4)])
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (every[:-1] + every[1:]) / 2
    numbers = torch.cat([numbers, every, -every, middles, -middles, torch.tensor([448.1, -1e6, 464.0, 1e30])])
    kv = context(5, 1, len(numbers), dtype=torch.float8_e4m3fn)
    key = numbers.view(1, 1, -1)
    cache_write.write(key, -key, kv.keys[0], kv.values[0], torch.tensor([17]))
    right = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(kv.keys[0].float()[1, 1, 0], right)
    assert torch.equal(kv.values[0].float()[1, 1, 0], -right)
