"""Families over ranks in threads: the whole model's logits and texts, by one sum for attention and one for the rest."""

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.drafting.assembly import check_files
from engine.errors import ModelError
from engine.execution.footprint import footprint
from engine.models.causal_lm import Shard, holds_attention_whole
from engine.models.loader import load_model
from engine.models.source import ModelSource
from engine.params import SamplingParams
from tests.engine.models.layers.test_quantization import mark, planned
from tests.engine.models.test_shards import Ranks, load_ranks, logits_of
from tests.engine.ranks import AbsentOthers, on_ranks
from tests.engine.running import make_engine, run
from tests.engine.tiny import EXPERTS, GEMMA4, HEADS, LATENT, LONGCAT, SIZES, backend_of, save, source_of

FOUR = SIZES | EXPERTS | {"num_key_value_heads": 4}
DENSE = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    **dict.fromkeys(("Glm", "Glm4", "GraniteSWA", "Olmo2", "Olmo3"), HEADS),
    **dict.fromkeys(("MiniCPM3", "Youtu"), LATENT),
    "Gemma3Text": HEADS | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma4Text": GEMMA4 | {"num_global_key_value_heads": 2},
}
MIXTURES = {
    **dict.fromkeys(("GptOss", "Mixtral", "Qwen2Moe", "Qwen3Moe"), HEADS),
    "DeepseekV3": LATENT,
    "LongcatFlash": LATENT | LONGCAT | {"num_hidden_layers": None},
}


def config_of(name, **changes):
    cls = getattr(transformers, f"{name}Config")
    known = cls.__dataclass_fields__
    settings = {key: value for key, value in (FOUR | (DENSE | MIXTURES)[name] | changes).items() if key in known}
    return cls(**{key: value for key, value in settings.items() if value is not None or key.endswith("_id")})


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


@pytest.mark.parametrize("name", DENSE)
def test_two_ranks_compute_the_whole_models_logits_with_one_sum_for_each_block(name, tmp_path):
    config = config_of(name)
    path = save(config, tmp_path, factor=3.0)
    ranks, num_sums = check_logits(path, 2)
    blocks = (1 if holds_attention_whole(config) else 2) * config.num_hidden_layers
    assert num_sums == 2 * blocks
    whole = sum(parameter.numel() for parameter in backend_of(path).model.module.parameters())
    module = ranks[1].model.module
    assert sum(parameter.numel() for parameter in module.parameters()) < 0.8 * whole
    tensors = [*module.named_parameters(), *module.named_buffers()]
    loaded = sum(tensor.nbytes for name, tensor in tensors if not name.endswith("inv_freq"))
    assert planned(path, world_size=2) == pytest.approx(loaded, rel=0.002)


@pytest.mark.parametrize("name", ["Glm4", "Llama", "MiniCPM3"])
def test_four_ranks_write_the_whole_models_texts(name, tmp_path):
    path = save(config_of(name), tmp_path, factor=3.0)
    models, _ = check_logits(path, 4)
    params = [SamplingParams(temperature=0.5 * i, seed=i, max_tokens=12, ignore_eos=True) for i in range(2)]
    requests = [([3 + i, 9, 4], params[i]) for i in range(2)]
    expected = run(make_engine(backend_of(path), num_speculative_tokens=0), requests)
    settings = {"num_speculative_tokens": 3, "drafting": "self", "self_draft_layers": 1}
    engines = on_ranks(lambda model: make_engine(model, **settings), models)
    engines[0].verifier = Ranks([one.verifier for one in engines])
    assert run(engines[0], requests) == expected
    assert engines[0].stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Youtu", {"num_attention_heads": 3, "num_key_value_heads": 3}, "3 attention heads, not divisible"),
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


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_are_left_to_vllm(name, tmp_path, monkeypatch):
    path = save(config_of(name), tmp_path)
    with pytest.raises(ModelError, match="a mixture of experts, which over several ranks is served by execution=vllm"):
        backend_of(path, Shard(0, 2, AbsentOthers()))
    monkeypatch.setattr(ModelSource, "tokenizer", None)
    check_files(source_of(path, execution="vllm"), None, 2)
    with pytest.raises(ModelError, match="a mixture of experts"):
        check_files(source_of(path), None, 2)


@pytest.mark.parametrize("saved", [False, True], ids=["rounded", "saved"])
def test_quantised_weights_are_left_to_vllm_before_anything_loads(saved, tmp_path):
    path = save(config_of("Glm4"), tmp_path)
    if saved:
        mark(tmp_path, quant_method="awq", bits=4)
    source = source_of(path, **({} if saved else {"quantization": "int8"}))
    for refuse in (
        lambda: load_model(source, Shard(0, 2, AbsentOthers())),
        lambda: footprint(source, EngineConfig(), dtype=torch.float32, bytes_per_weight=4, world_size=2),
    ):
        with pytest.raises(ModelError, match="is quantised, which over several ranks is served by execution=vllm"):
            refuse()
