"""The plan: choices by hand, its pools, what it refuses, and the command."""

import pytest

from tests.bench.paced.datasheet import PASS_S, Hardware, Model
from tests.bench.paced.roofline import HIT_RATE, PacedDevice, Pair
from tests.bench.plan import choices, pooled_round_s

PRICE = {"h100": 3.0, "l4": 0.6}


def device(name: str, read_ms: float, token_ms: float = 0.0, num_gpus: int = 1) -> PacedDevice:
    """A device whose pass takes `read_ms`, or `token_ms` for each of its tokens, if that is more."""
    bytes_per_s = 2e9 / (read_ms * 1e-3 - PASS_S) / num_gpus
    flops = 2e9 / (token_ms * 1e-3) / num_gpus if token_ms else 1e30
    return PacedDevice(Model(1e9, 0.0, 1, 0, 0), Hardware(bytes_per_s, flops, 1.0, 0.0), num_gpus, name)


TARGET, DRAFT = device("h100x4-70b", 10.0, num_gpus=4), device("l4-1b", 1.0)


def test_every_arm_by_hand() -> None:
    """Half of first tokens and a quarter of second ones: k = 2 brings 1.75 tokens; a pass takes 10 ms, a draft's 1."""
    found = list(choices(TARGET, [DRAFT], [0.5, 0.25], PRICE, [8], [2], wanted_per_s=5000))
    by_arm = {one.arm: one for one in found}
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


def test_as_many_groups_share_a_pass_as_wait_at_the_same_time() -> None:
    """A pass for m groups takes 2 m ms, a round 10 + 2 m, so m = 8 * 2 m / (10 + 2 m) of 8 groups wait: m = 3."""
    pair = Pair(TARGET, device("l4-1b", 1.0, 0.25))
    round_s, together = pooled_round_s(pair, 8, 1, "none", 8)
    assert together == pytest.approx(3, rel=0.03)
    assert round_s == pytest.approx(0.016, rel=0.03)
    assert pooled_round_s(pair, 8, 1, "none", 1) == (pytest.approx(0.012, rel=0.003), 1.0)
    # Two proposals for half of the rows in 20 ms, 1 ms each.
    assert pooled_round_s(pair, 8, 1, "alternate", 8) == (pytest.approx(0.020, rel=0.003), 1.0)
