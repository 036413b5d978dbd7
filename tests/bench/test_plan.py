"""The plan: choices by hand, its pools, what it refuses, and the command."""

import pytest

from tests.bench.paced.roofline import HIT_RATE, PASS_S, Hardware, Model, PacedDevice
from tests.bench.plan import choices

PRICE = {"h100": 3.0, "l4": 0.6}


def device(name: str, read_ms: float, token_ms: float = 0.0, num_gpus: int = 1) -> PacedDevice:
    """A device whose pass takes `read_ms`, or `token_ms` for each of its tokens, if that is more."""
    bytes_per_s = 2e9 / (read_ms * 1e-3 - PASS_S) / num_gpus
    flops = 2e9 / (token_ms * 1e-3) / num_gpus if token_ms else 1e30
    return PacedDevice(Model(1e9, 0.0, 1, 0, 0), Hardware(bytes_per_s, flops, 1.0, 0.0), num_gpus, name)


TARGET, DRAFT = device("h100x4-70b", 10.0, num_gpus=4), device("l4-1b", 1.0)


def test_every_arm_by_hand():
    """Half of first tokens and a quarter of second ones: k = 2 brings 1.75 tokens; a pass takes 10 ms, a draft's 1."""
    planned = list(choices(TARGET, [DRAFT], [0.5, 0.25], PRICE, [8], [2], wanted_per_s=5000))
    by_arm = {choice.arm: choice for choice in planned}
    plain, turn, ahead = by_arm["no draft"], by_arm["own draft in turn"], by_arm["own draft ahead"]
    assert (plain.k, plain.gpus, plain.dollars_per_hour, plain.replicas) == (0, 4, 12.0, 7)
    assert plain.tokens_per_s == pytest.approx(800)
    assert plain.tokens_per_s_per_gpu == pytest.approx(200)
    assert plain.dollars_per_million == pytest.approx(12 / 3600 / 800 * 1e6)
    assert (turn.k, turn.gpus, turn.num_groups, turn.dollars_per_hour, turn.replicas) == (2, 5, 1, 12.6, 5)
    assert turn.tokens_per_s == pytest.approx(8 * 1.75 / 0.012)
    hits = HIT_RATE**8
    assert ahead.tokens_per_s == pytest.approx(8 * 1.75 / (hits * 0.010 + (1 - hits) * 0.012))
    assert by_arm["own draft alternating"].tokens_per_s == pytest.approx(8 * 1.75 / 0.020)
    # One of the target's GPUs takes 40 ms for a pass over as many weights as its four read in 10 ms.
    beside = by_arm["beside the target"]
    assert (beside.draft, beside.gpus, beside.dollars_per_hour) == ("h100-1b", 4, 12.0)
    assert beside.tokens_per_s == pytest.approx(8 * 1.5 / 0.050, rel=2e-2)
    pool = by_arm["pool of 2 : 1"]
    assert (pool.gpus, pool.dollars_per_hour, pool.num_groups) == (4.5, 12.3, 2)
    assert pool.tokens_per_s == pytest.approx(ahead.tokens_per_s)
