"""The roofline: what bounds a pass, and what a model's files and a GPU's name tell of it."""

import pytest

from tests.bench.paced.datasheet import (
    ALL_REDUCES_PER_LAYER,
    BYTES,
    HARDWARE,
    PASS_S,
    Hardware,
    Model,
    Placed,
    decoding,
    placed,
)
from tests.published import LLAMA_1B, LLAMA_8B, LLAMA_70B, published

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


@pytest.mark.parametrize(
    ("settings", "layer_weights", "head_weights", "kv_size"),
    [(LLAMA_70B, 68.45e9, 1.05e9, 1024), (LLAMA_8B, 6.98e9, 0.525e9, 1024), (LLAMA_1B, 0.973e9, 0.263e9, 512)],
)
def test_the_figures_of_a_model_are_those_of_its_configuration_and_files(
    settings, layer_weights, head_weights, kv_size, tmp_path
):
    on_gpu = placed(published(tmp_path, settings), "H100")
    assert on_gpu is not None
    model = on_gpu.model
    assert (model.layer_weights, model.head_weights) == pytest.approx((layer_weights, head_weights), rel=0.002)
    sizes = (settings["num_hidden_layers"], settings["hidden_size"], kv_size, 2.0, 0.0)
    assert (model.layers, model.hidden_size, model.kv_size, model.weight_bytes, model.expert_weights) == sizes


def test_weights_that_decoding_does_not_read_do_not_count(tmp_path):
    source = published(tmp_path, LLAMA_1B)
    alone = placed(source, "L4")
    source.weight_shapes |= {"model.layers.16.mlp.up_proj.weight": (10**5, 10**5)}  # beyond the last: an MTP layer
    source.weight_shapes |= {"vision_tower.layers.0.mlp.up_proj.weight": (10**5, 10**5)}
    assert placed(source, "L4") == alone


def test_experts_are_told_from_other_weights_and_a_mixture_of_unknown_shares_is_unknown(tmp_path):
    mixture = LLAMA_1B | {"num_local_experts": 8, "num_experts_per_tok": 2}
    source = published(tmp_path, mixture)
    source.weight_shapes |= {"model.layers.0.mlp.experts.3.up_proj.weight": (1000, 2000)}
    assert placed(source, "L4").model.expert_weights == 2e6
    assert placed(source, "L4").model.expert_share == 0.25
    assert placed(published(tmp_path, LLAMA_1B | {"num_local_experts": 8}), "L4") is None


@pytest.mark.parametrize(("quantization", "num_bytes"), [("int8", 1.0), ("fp8", 1.0), ("int4", 0.5625)])
def test_rounded_layers_are_read_in_fewer_bytes(quantization, num_bytes, tmp_path):
    assert placed(published(tmp_path, LLAMA_1B, quantization=quantization), "L4").model.weight_bytes == num_bytes


def test_of_a_model_that_is_saved_quantised_the_files_are_read(tmp_path):
    """36 GB of files, of which two embeddings of 16 bits are not layers: the head is read apart, the other never."""
    source = published(tmp_path, LLAMA_70B | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    source.weight_files = [tmp_path / "model.safetensors"]
    with source.weight_files[0].open("wb") as file:
        file.truncate(36 * 10**9)
    layer_bytes = BYTES * placed(source, "H100").model.layer_weights
    assert layer_bytes == pytest.approx(36e9 - 2 * 2 * 128256 * 8192)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("H100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("L40S", "l40s"),
        ("NVIDIA-L4", "l4"),
        ("NVIDIA H200", "h200"),
        ("B200", "b200"),
    ],
)
def test_a_gpu_is_known_by_a_word_of_its_name(name, word, tmp_path):
    assert placed(published(tmp_path, LLAMA_1B), name).hardware == HARDWARE[word]


@pytest.mark.parametrize("name", ["", "cpu", "L40", "A1000", "T4", "AMD-Instinct-MI300X-OAM"])
def test_nothing_is_said_of_an_unknown_gpu(name, tmp_path):
    assert placed(published(tmp_path, LLAMA_1B), name) is None
