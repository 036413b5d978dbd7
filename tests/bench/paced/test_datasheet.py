"""The roofline: what bounds a pass."""

import pytest

from tests.bench.paced.datasheet import (
    ALL_REDUCES_PER_LAYER,
    BYTES,
    PASS_S,
    Hardware,
    Model,
    Placed,
    decoding,
)

HARDWARE_OF_TESTS = Hardware(bytes_per_s=1e12, flops=1e14, link_bytes_per_s=1e11, all_reduce_s=1e-5)
MODEL = Model(layer_weights=9e9, head_weights=1e9, layers=10, hidden_size=1000, kv_size=100)


def seconds(work, num_gpus=1, model=MODEL):
    return Placed(model, HARDWARE_OF_TESTS, num_gpus).pass_seconds(work) - PASS_S


def test_few_tokens_are_bound_by_weights_and_cache_and_many_by_arithmetic():
    kv_bytes = 2 * BYTES * 10 * 100 * 3 * 50
    assert seconds(decoding(3, 1, 50)) == pytest.approx((BYTES * 10e9 + kv_bytes) / 1e12)
    products, attention = 10e9 * 1024, 2 * 10 * 1000 * 1024 * 1000
    assert seconds(decoding(8, 128, 1000)) == pytest.approx(2 * (products + attention) / 1e14)


def test_gpus_share_the_work_and_add_two_all_reduces_a_layer():
    moved = BYTES * 5 * 1000 * 2 * 3 / 4
    all_reduces = ALL_REDUCES_PER_LAYER * 10 * (1e-5 + moved / 1e11)
    assert seconds(decoding(1, 5, 0), num_gpus=4) == pytest.approx(BYTES * 10e9 / 4 / 1e12 + all_reduces)


def test_experts_are_read_as_far_as_tokens_are_computed_with_them():
    """With 2 of 8 experts a token: one reads a quarter, two 1 - 0.75^2; each computes with a quarter."""
    mixture = MODEL._replace(expert_weights=40e9, expert_share=0.25)
    assert seconds(decoding(1, 1, 0), model=mixture) == pytest.approx(2 * (10e9 + 10e9) / 1e12)
    assert seconds(decoding(2, 1, 0), model=mixture) == pytest.approx(2 * (10e9 + 40e9 * 0.4375) / 1e12)
    assert seconds(decoding(8, 128, 0), model=mixture) == pytest.approx(2 * 20e9 * 1024 / 1e14)
