"""Figures of hardware and models: what a decoding pass takes with them, beside what is known of real ones."""

import pytest

from engine.execution.paced.parameters import BYTES, HARDWARE, MODELS
from engine.execution.paced.roofline import decoding, pass_seconds


@pytest.mark.parametrize(
    ("hardware", "num_gpus", "model", "expected_ms"),
    [
        ("h100", 1, "1b", 0.82),  # 2.5 GB at 3.0 TB/s
        ("h100", 1, "8b", 5.0),  # 15 GB at 3.0 TB/s
        ("h100", 4, "70b", 14.5),  # 139 GB over four, and 3 ms of all-reduces
        ("h200", 4, "70b", 11.0),
        ("a100", 1, "8b", 8.2),
        ("l4", 1, "1b", 9.1),
    ],
)
def test_a_pass_over_one_row_is_bound_by_reading_the_weights(hardware, num_gpus, model, expected_ms):
    seconds = pass_seconds(decoding(1, 1, 200), MODELS[model], HARDWARE[hardware], num_gpus)
    assert seconds * 1e3 == pytest.approx(expected_ms, rel=0.04)


@pytest.mark.parametrize(("model", "parameters"), [("70b", 70.55e9), ("8b", 8.03e9), ("1b", 1.236e9)])
def test_the_weights_are_those_of_the_published_models_without_an_embedding_that_is_only_looked_up(model, parameters):
    figures = MODELS[model]
    is_tied = model == "1b"
    total = figures.layer_weights + figures.head_weights * (1 if is_tied else 2)
    assert total == pytest.approx(parameters, rel=0.005)


def test_a_token_of_the_70b_model_takes_320_kib_of_cache():
    model = MODELS["70b"]
    assert 2 * BYTES * model.layers * model.kv_size == 320 * 1024
