"""The roofline: what bounds a pass, what is known of real ones, and the names of devices."""

import pytest

from engine.errors import ConfigError
from tests.bench.paced.roofline import (
    ALL_REDUCES_PER_LAYER,
    BYTES,
    HARDWARE,
    MODELS,
    PASS_S,
    Hardware,
    Model,
    PacedDevice,
    Pair,
    decoding,
    pass_seconds,
)


def seconds(work, num_gpus=1):
    hardware = Hardware(bytes_per_s=1e12, flops=1e14, link_bytes_per_s=1e11, all_reduce_s=1e-5)
    model = Model(layer_weights=9e9, head_weights=1e9, layers=10, hidden_size=1000, kv_size=100)
    return pass_seconds(work, model, hardware, num_gpus) - PASS_S


def test_few_tokens_are_bound_by_weights_and_cache_and_many_by_arithmetic():
    kv_bytes = 2 * BYTES * 10 * 100 * 3 * 50
    assert seconds(decoding(3, 1, 50)) == pytest.approx((BYTES * 10e9 + kv_bytes) / 1e12)
    products, attention = 10e9 * 1024, 2 * 10 * 1000 * 1024 * 1000
    assert seconds(decoding(8, 128, 1000)) == pytest.approx(2 * (products + attention) / 1e14)


def test_gpus_share_the_work_and_add_two_all_reduces_a_layer():
    moved = BYTES * 5 * 1000 * 2 * 3 / 4
    all_reduces = ALL_REDUCES_PER_LAYER * 10 * (1e-5 + moved / 1e11)
    assert seconds(decoding(1, 5, 0), num_gpus=4) == pytest.approx(BYTES * 10e9 / 4 / 1e12 + all_reduces)


@pytest.mark.parametrize(
    ("name", "expected_ms"),
    [
        ("h100-1b", 0.82),  # 2.5 GB at 3.0 TB/s
        ("h100-8b", 5.0),  # 15 GB at 3.0 TB/s
        ("h100x4-70b", 14.5),  # 139 GB over four, and 3 ms of all-reduces
        ("h200x4-70b", 11.0),
        ("a100-8b", 8.2),
        ("l4-1b", 9.1),
    ],
)
def test_a_pass_over_one_row_is_bound_by_reading_the_weights(name, expected_ms):
    assert PacedDevice.of(name).pass_seconds(decoding(1, 1, 200)) * 1e3 == pytest.approx(expected_ms, rel=0.04)


@pytest.mark.parametrize(("model", "parameters"), [("70b", 70.55e9), ("8b", 8.03e9), ("1b", 1.236e9)])
def test_the_weights_are_the_published_models_without_an_embedding_that_is_only_looked_up(model, parameters):
    figures, heads = MODELS[model], 1 if model == "1b" else 2  # the 1B model's embedding is tied
    assert figures.layer_weights + figures.head_weights * heads == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize("name", ["", "h100", "h100x0-8b", "b9-8b", "h100-9b", "+"])
def test_a_wrong_name_is_refused_with_the_names_that_there_are(name):
    with pytest.raises(ConfigError, match=r"GPUxN-model.*h100.*70b"):
        PacedDevice.of(name)


def test_a_pairs_passes_are_its_devices_and_the_bound_hides_the_draft():
    pair = Pair.of("h100x4-70b+l4-1b")
    verify_s = pass_seconds(decoding(8, 5, 300), MODELS["70b"], HARDWARE["h100"], 4)
    draft_s = 4 * pass_seconds(decoding(8, 1, 300), MODELS["1b"], HARDWARE["l4"], 1)
    assert (pair.target_s(8.2, 4, 300.4), pair.draft_s(8.2, 4, 300.4)) == (verify_s, draft_s)
    assert pair.bound(8, 4, 300) == 1 + draft_s / verify_s
    assert Pair.of("h100-8b").draft == Pair.of("h100-8b").target
