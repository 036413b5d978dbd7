"""The noise: a fixed function, and as good as random."""

import random

import pytest
import torch
from scipy.stats import chi2

from engine.sampling import noise

CPU = torch.device("cpu")
LEVEL = 1e-6
"""Of a false alarm, per test; seeds are fixed, so there is none unless the hash changes."""


def ids(*tokens):
    return torch.tensor(tokens, dtype=torch.int32)


KEYS = [[1293516399, -1492722385], [1369936299, 689074332], [-1981961502, 1244931034], [-132614676, 1551448068]]
UNIFORM = [12085625, 5043812, 12856073, 4426849]


def random_keys(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count, 2), generator=generator).to(torch.int32)


def p_of_equal(cells):
    expected = cells.sum() / len(cells)
    return float(chi2.sf(((cells - expected) ** 2 / expected).sum().item(), len(cells) - 1))


def murmur(low, high, token):
    """The hash again, with Python's integers."""
    mask = 0xFFFFFFFF
    x = (token ^ low) & mask
    x ^= x >> 16
    x = x * 0x85EBCA6B & mask
    x ^= high & mask
    x ^= x >> 13
    x = x * 0xC2B2AE35 & mask
    x ^= x >> 16
    return x >> 1


def test_the_hash_is_the_one_it_says_it_is():
    chance = random.Random(0)
    keys = random_keys(200)
    tokens = [chance.randrange(2**31) for _ in range(50)] + [0, 1, 2**31 - 1]
    results = noise.uniform(keys, ids(*tokens))
    for row, (low, high) in zip(results.tolist(), keys.tolist(), strict=True):
        for value, token in zip(row, tokens, strict=True):
            exact = (murmur(low, high, token) + 0.5) / 2**31
            assert value == pytest.approx(min(exact, 1 - 2**-24), abs=2**-24)


def test_a_seeds_numbers_never_change():
    """A change here changes the text of every seeded request."""
    keys = noise.keys([0, 1, -1, 2**63 - 1], [0, 17, 100_000, 3], noise.TARGET_STREAM, CPU)
    assert keys.tolist() == KEYS
    assert [round(u * 2**24) for u in noise.uniform(keys, ids(5)).squeeze(-1).tolist()] == UNIFORM


def test_streams_positions_and_seeds_have_keys_of_their_own():
    results = {
        tuple(key)
        for stream in range(4)
        for seed in range(60)
        for key in noise.keys([seed] * 60, range(60), stream, CPU).tolist()
    }
    assert len(results) == 4 * 60 * 60


def test_numbers_lie_strictly_between_0_and_1_and_noise_is_finite():
    keys, tokens = torch.zeros(1, 2, dtype=torch.int32), [preimage(0), preimage(0xFFFFFFFF)]
    lowest, highest = noise.uniform(keys, ids(*tokens))[0].tolist()
    assert (lowest, highest) == (2.0**-32, 1 - 2.0**-24)
    assert noise.gumbel(keys, ids(*tokens)).isfinite().all()


def preimage(x):
    """The token id that hashes to `x` under a key of zeros."""
    mask = 0xFFFFFFFF
    x ^= x >> 16
    x = x * pow(0xC2B2AE35, -1, 2**32) & mask
    x ^= (x >> 13) ^ (x >> 26)
    x = x * pow(0x85EBCA6B, -1, 2**32) & mask
    x ^= x >> 16
    return x - 2**32 if x >= 2**31 else x


@pytest.mark.parametrize("stream", [noise.TARGET_STREAM, noise.ACCEPT_STREAM])
def test_neighbouring_positions_and_streams_are_independent(stream):
    """The keys come from counters here, as in a round."""
    seeds = range(40_000)
    first = noise.uniform(noise.keys(seeds, [5] * 40_000, stream, CPU), ids(0))
    second = noise.uniform(noise.keys(seeds, [6] * 40_000, stream, CPU), ids(0))
    third = noise.uniform(noise.keys(seeds, [5] * 40_000, stream + 1, CPU), ids(0))
    for other in (second, third):
        index = (first * 12).long() * 12 + (other * 12).long()
        assert p_of_equal(torch.bincount(index.squeeze(-1), minlength=144).double()) > LEVEL


def test_numbers_do_not_depend_on_the_batch():
    keys, tokens = random_keys(20), torch.arange(30, dtype=torch.int32)
    whole = noise.gumbel(keys, tokens)
    assert torch.equal(noise.gumbel(keys[7:8], tokens[3:9]), whole[7:8, 3:9])
    row_tokens = tokens[3:9].repeat(20, 1)
    assert torch.equal(noise.gumbel(keys, row_tokens), whole[:, 3:9])
