"""The roofline: what bounds a pass, and how it grows with tokens, contexts and GPUs."""

import pytest

from engine.execution.paced.parameters import ALL_REDUCES_PER_LAYER, BYTES, PASS_S, Hardware, Model
from engine.execution.paced.roofline import Work, decoding, pass_seconds

HARDWARE = Hardware(bytes_per_s=1e12, flops=1e14, link_bytes_per_s=1e11, all_reduce_s=1e-5)
MODEL = Model(layer_weights=9e9, head_weights=1e9, layers=10, hidden_size=1000, kv_size=100)


def seconds(work, num_gpus=1):
    return pass_seconds(work, MODEL, HARDWARE, num_gpus) - PASS_S


def test_few_tokens_are_bound_by_weights_and_cache():
    kv_bytes = 2 * BYTES * 10 * 100 * 3 * 50
    assert seconds(decoding(3, 1, 50)) == pytest.approx((BYTES * 10e9 + kv_bytes) / 1e12)


def test_many_tokens_are_bound_by_arithmetic():
    work = decoding(8, 128, 1000)
    products, attention = 10e9 * 1024, 2 * 10 * 1000 * 1024 * 1000
    assert seconds(work) == pytest.approx(2 * (products + attention) / 1e14)


def test_tokens_without_logits_do_not_need_the_head():
    assert seconds(Work(1, 0, 0, 0)) == pytest.approx(BYTES * 9e9 / 1e12)
    prompt = Work(1024, 1, 0, 0)
    assert seconds(prompt) == pytest.approx(2 * (9e9 * 1024 + 1e9) / 1e14)


def test_gpus_share_the_work_and_add_two_all_reduces_a_layer():
    work = decoding(1, 5, 0)
    moved = BYTES * 5 * 1000 * 2 * 3 / 4
    all_reduces = ALL_REDUCES_PER_LAYER * 10 * (1e-5 + moved / 1e11)
    assert seconds(work, num_gpus=4) == pytest.approx(BYTES * 10e9 / 4 / 1e12 + all_reduces)
    assert seconds(work) == pytest.approx(BYTES * 10e9 / 1e12)


def test_longer_contexts_take_longer():
    assert seconds(decoding(32, 1, 8000)) > seconds(decoding(32, 1, 1000)) > seconds(decoding(1, 1, 1000))
