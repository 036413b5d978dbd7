"""Families over ranks in threads: the whole model's logits and texts, by one sum for attention and one for experts."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models.causal_lm import Shard, holds_attention_whole
from engine.params import SamplingParams
from tests.engine.models.layers.test_quantization import planned
from tests.engine.models.test_shards import Ranks, load_ranks, logits_of
from tests.engine.ranks import AbsentOthers, on_ranks
from tests.engine.running import make_engine, run
from tests.engine.tiny import EXPERTS, GEMMA4, HEADS, LATENT, LONGCAT, SIZES, backend_of, save

FOUR = SIZES | EXPERTS | {"num_key_value_heads": 4}
LLAMA4 = {"layer_types": ["full_attention"] * 2, "attn_temperature_tuning": False, "intermediate_size_mlp": 64}
FAMILIES = {
    **dict.fromkeys(("Mixtral", "Qwen2Moe", "Qwen3Moe", "Glm4Moe", "Dots1", "SolarOpen", "HYV3", "Afmoe"), HEADS),
    **dict.fromkeys(("GptOss", "HunYuanMoEV1", "MiniMaxM2", "Olmoe", "FlexOlmo", "Phimoe"), HEADS),
    **dict.fromkeys(("GraniteMoe", "GraniteMoeShared", "Glm", "Glm4", "Olmo2", "Olmo3"), HEADS),
    **dict.fromkeys(("AXK1", "DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Youtu"), LATENT),
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Gemma3Text": HEADS | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma4Text": GEMMA4 | {"num_global_key_value_heads": 2},
    "Llama4Text": HEADS | LLAMA4,
    "LongcatFlash": LATENT | LONGCAT | {"num_hidden_layers": None},
}


def config_of(name, **changes):
    cls = getattr(transformers, f"{name}Config")
    known = cls.__dataclass_fields__
    settings = {key: value for key, value in (FOUR | FAMILIES[name] | changes).items() if key in known}
    return cls(**{key: value for key, value in settings.items() if value is not None or key.endswith("_id")})


def save_family(config, path):
    """Write a random model, whose experts' biases are not 0."""
    save(config, path, factor=3.0)
    weights = load_file(path / "model.safetensors")
    for weight in (weight for name, weight in weights.items() if name.endswith("proj_bias")):
        weight.normal_()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return str(path)


def check_logits(path, world_size):
    """Compare every rank's logits to the whole model's, and the ranks' bits; return the ranks and a rank's sums."""
    ranks, reducers = load_ranks(path, world_size)
    (expected,) = logits_of([backend_of(path)])
    for reducer in reducers:
        reducer.sums.clear()
    first, *others = logits_of(ranks)
    assert (first - expected).abs().max() < 1e-4 * expected.abs().max()
    assert all(torch.equal(logits, first) for logits in others), "ranks that draw for themselves could part ways"
    (num_sums,) = {len(reducer.sums) for reducer in reducers}
    return ranks, num_sums


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_compute_the_whole_models_logits_with_one_sum_for_each_block(name, tmp_path):
    config = config_of(name)
    path = save_family(config, tmp_path)
    ranks, num_sums = check_logits(path, 2)
    blocks = (1 if holds_attention_whole(config) else 2) * config.num_hidden_layers
    # A norm between the experts and their sum leaves two sums; LongCat has experts beside two dense layers.
    assert num_sums == 2 * (blocks + {"AXK1": 1, "LongcatFlash": 1}.get(name, 0))
    whole = sum(parameter.numel() for parameter in backend_of(path).model.module.parameters())
    module = ranks[1].model.module
    assert sum(parameter.numel() for parameter in module.parameters()) < 0.8 * whole
    left_out = ("inv_freq", *(["lm_head.weight"] if config.tie_word_embeddings else []))  # a view of the embeddings
    tensors = [*module.named_parameters(), *module.named_buffers()]
    loaded = sum(tensor.nbytes for name, tensor in tensors if not name.endswith(left_out))
    assert planned(path, world_size=2) == pytest.approx(loaded, rel=0.01)


@pytest.mark.parametrize("name", ["DeepseekV3", "GptOss", "Llama"])
def test_four_ranks_write_the_whole_models_texts(name, tmp_path):
    path = save_family(config_of(name), tmp_path)
    models, _ = check_logits(path, 4)
    params = [SamplingParams(temperature=0.5 * i, seed=i, max_tokens=12, ignore_eos=True) for i in range(2)]
    requests = [([3 + i, 9, 4], params[i]) for i in range(2)]
    expected = run(make_engine(backend_of(path), num_speculative_tokens=0), requests)
    settings = {"num_speculative_tokens": 3, "drafting": "self", "self_draft_layers": 1}
    engines = on_ranks(lambda model: make_engine(model, **settings), models)
    engines[0].verifier = Ranks([one.verifier for one in engines])
    assert run(engines[0], requests) == expected
    assert engines[0].stats.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_that_cannot_be_sliced_are_shared_whole(name, tmp_path):
    """In files, Mixtral has every expert by itself, and gpt-oss all of them in one tensor."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    path = save_family(config_of(name, intermediate_size=20, num_local_experts=6, **heads), tmp_path)
    ranks, _ = check_logits(path, 3)
    weights = [rank.model.module.model.layers[0].mlp.experts.down_proj for rank in ranks]
    whole = backend_of(path).model.module.model.layers[0].mlp.experts.down_proj
    assert torch.equal(torch.cat(weights), whole)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Mixtral", {"intermediate_size": 33, "num_local_experts": 3}, "3 experts of size 33, not divisible"),
        ("Llama4Text", {"intermediate_size": 33}, "4 experts of size 33, not divisible"),
        ("DeepseekV3", {"num_attention_heads": 3, "num_key_value_heads": 3}, "3 attention heads, not divisible"),
        ("Glm", {"intermediate_size": 33}, "has size 33, not divisible"),
    ],
)
def test_sizes_that_ranks_cannot_share_are_refused_by_name(name, changes, message, tmp_path):
    path = save(config_of(name, **changes), tmp_path)
    with pytest.raises(ModelError, match=f"{message} by tensor_parallel_size 2"):
        backend_of(path, Shard(0, 2, AbsentOthers()))


def test_states_of_linear_layers_are_not_split_over_ranks(tmp_path):
    config = transformers.Lfm2Config(**SIZES | {"layer_types": ["conv", "full_attention"]})
    with pytest.raises(ModelError, match="lfm2, whose linear layers' states are not split over ranks"):
        backend_of(save(config, tmp_path), Shard(0, 2, AbsentOthers()))


def test_an_expert_that_a_rank_lacks_is_named(tmp_path):
    path = save(config_of("Mixtral", intermediate_size=17), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[next(name for name in weights if ".experts.1.w3" in name)]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weights model\.layers\.\d\.mlp\.experts\.gate_up_proj"):
        backend_of(path, Shard(0, 2, AbsentOthers()))


def test_ranks_keep_in_float32_what_the_whole_model_does(tmp_path):
    save_family(config_of("DeepseekV3"), tmp_path)
    ranks, _ = load_ranks(tmp_path, 2, dtype="bfloat16")
    for backend in (*ranks, backend_of(tmp_path, dtype="bfloat16")):
        gate = backend.model.module.model.layers[1].mlp.gate
        assert (gate.e_score_correction_bias.dtype, gate.weight.dtype) == (torch.float32, torch.bfloat16)
