"""Thinned models compute what transformers computes of the same weights without these sub-layers."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen3Config,
)

from engine.config import EngineConfig, ModelConfig
from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.execution.registry import load_backend
from engine.models.sub_layers import check_self_draft, skipped_sub_layers, thin
from tests.engine.tiny import EXPERTS, HEADS, SIZES, save

LAYERS = 4
CONFIGS = {
    "llama": LlamaConfig(**SIZES | {"num_hidden_layers": LAYERS}),
    "qwen3": Qwen3Config(**SIZES | HEADS | {"num_hidden_layers": LAYERS}),
    "gemma2": Gemma2Config(**SIZES | HEADS | {"num_hidden_layers": LAYERS, "sliding_window": 6}),
    "gpt_neox": GPTNeoXConfig(**SIZES | {"num_hidden_layers": LAYERS, "num_key_value_heads": 4}),
    "cohere2": Cohere2Config(**SIZES | {"num_hidden_layers": LAYERS, "sliding_window": 6}),
    "mixtral": MixtralConfig(**SIZES | EXPERTS | {"num_hidden_layers": LAYERS}),
    "gpt_oss": GptOssConfig(
        **SIZES | HEADS | {"num_hidden_layers": LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
}
TOKENS = [5, 9, 2, 7, 30, 12, 8, 8, 3, 21]
SKIPPED = {
    "one layer": [f"{kind}.{index}" for index in (1, 2, 3) for kind in ("attention", "mlp")],
    "three layers": ["attention.3", "mlp.3"],
    "without an attention": ["attention.1"],
    "without an MLP": ["mlp.2"],
    "without several": ["attention.0", "mlp.1", "attention.2", "mlp.3"],
    "without the first layer": ["attention.0", "mlp.0"],
}


@pytest.fixture(scope="module", params=CONFIGS)
def path(request, tmp_path_factory):
    return save(CONFIGS[request.param], tmp_path_factory.mktemp("model"), seed=1)


def reference(path, skipped):
    """The logits of transformers' own model, in which hooks put zeros in place of what sub-layers return."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    def nothing(module, inputs, output):
        return (torch.zeros_like(output[0]), None) if isinstance(output, tuple) else torch.zeros_like(output)

    layers = next(child for child in model.modules() if isinstance(child, torch.nn.ModuleList) and len(child) == LAYERS)
    for name in skipped:
        kind, index = name.split(".")
        children = dict(layers[int(index)].named_children())
        names = ("mlp",) if kind == "mlp" else ("self_attn", "attention")
        next(children[name] for name in names if name in children).register_forward_hook(nothing)
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


@torch.inference_mode()
@pytest.mark.parametrize("skipped", SKIPPED.values(), ids=SKIPPED)
def test_a_thinned_model_computes_what_transformers_computes_without_these_sub_layers(skipped, path):
    """Chunk by chunk, over the whole model's keys and values of the layers that are left."""
    backend = load_backend(ModelConfig(path, dtype="float32", device="cpu"))
    kv = backend.allocate_kv(8, 4)
    thinned, seen = backend.thin(skipped, kv)
    logits = [
        thinned.run(build([ForwardRow(TOKENS[start:end], start, [3, 1, 5], end - start)], seen)).logits
        for start, end in ((0, 5), (5, 9), (9, 10))
    ]
    torch.testing.assert_close(torch.cat(logits), reference(path, skipped), atol=1e-4, rtol=1e-4)
    attended = [layer for layer in range(LAYERS) if f"attention.{layer}" not in skipped]
    assert [layer for layer in range(LAYERS) if kv.keys[layer].any()] == attended
    whole = backend.run(build([ForwardRow(TOKENS, 0, [3, 1, 5], len(TOKENS))], kv)).logits
    torch.testing.assert_close(whole, reference(path, []), atol=1e-4, rtol=1e-4)


def test_both_share_their_weights_and_the_whole_model_stays_as_it_is(path):
    backend = load_backend(ModelConfig(path, dtype="float32", device="cpu"))
    names = [name for name, _ in backend.model.module.named_modules()]
    thinned = thin(backend.model, SKIPPED["without several"]).model
    assert [name for name, _ in backend.model.module.named_modules()] == names
    weights = {id(parameter) for parameter in backend.model.module.parameters()}
    assert {id(parameter) for parameter in thinned.module.parameters()} < weights
    num_left = sum(parameter.numel() for parameter in thinned.module.parameters())
    assert thinned.info.num_parameters == num_left < backend.info.num_parameters


def test_a_compiled_layer_of_one_is_not_that_of_the_other(path):
    backend = load_backend(ModelConfig(path, dtype="float32", device="cpu"))
    name = next(name for name, child in backend.model.module.named_modules() if isinstance(child, torch.nn.ModuleList))
    whole = backend.model.module.get_submodule(name)
    first = thin(backend.model, SKIPPED["one layer"]).model.module.get_submodule(name)
    assert (len(whole), len(first)) == (LAYERS, 1)
    assert whole[0] is not first[0]


def test_layers_whose_sub_layers_cannot_be_told_apart_are_refused_by_name(tmp_path):
    config = OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4)
    config.max_position_embeddings, config.word_embed_proj_dim = 128, 32
    backend = load_backend(ModelConfig(save(config, tmp_path), dtype="float32", device="cpu"))
    backend.thin(["attention.1", "mlp.1"], backend.allocate_kv(2, 16))
    with pytest.raises(ModelError, match="OPTDecoderLayer has 0 sub-layers with a name of mlp, feed_forward"):
        thin(backend.model, ["mlp.0"])


def test_the_first_layers_are_those_after_which_everything_is_skipped():
    config = EngineConfig(drafting="self", self_draft_layers=2)
    assert skipped_sub_layers(config, "m", 4) == {"attention.2", "mlp.2", "attention.3", "mlp.3"}
    with pytest.raises(ModelError, match="self_draft_layers is 2; it must be at most 1, because m has 2 layers"):
        skipped_sub_layers(config, "m", 2)
    with pytest.raises(ModelError, match="self_draft_layers is 2; it cannot be used, because m has 1 layers"):
        skipped_sub_layers(config, "m", 1)


def test_sub_layers_that_a_model_does_not_have_are_refused_by_name_and_so_are_all_of_a_kind():
    def skip(*names):
        return skipped_sub_layers(EngineConfig(drafting="self", self_draft_skip=names), "m", 3)

    assert skip("mlp.0", "attention.2", "mlp.0") == {"mlp.0", "attention.2"}
    assert skip("mlp.0", "mlp.1", "mlp.2") == {"mlp.0", "mlp.1", "mlp.2"}
    with pytest.raises(ModelError, match=r"self_draft_skip has attention\.3, but m has 3 layers, counted from 0"):
        skip("mlp.0", "attention.3")
    with pytest.raises(ModelError, match="every attention sub-layer of m; one at least must be left"):
        skip("attention.0", "attention.1", "attention.2")


def test_the_layers_are_checked_before_anything_is_loaded(path, monkeypatch):
    monkeypatch.setattr(EagerBackend, "__init__", None)
    target = ModelConfig(path, device="cpu")
    check_self_draft(EngineConfig(drafting="self", self_draft_layers=LAYERS - 1), target)
    check_self_draft(EngineConfig(), ModelConfig("/nowhere"))
    with pytest.raises(ModelError, match=f"self_draft_layers is {LAYERS}; it must be at most {LAYERS - 1}, because"):
        check_self_draft(EngineConfig(drafting="self", self_draft_layers=LAYERS), target)
    with pytest.raises(ModelError, match=f"self_draft_skip has mlp.{LAYERS}, but .* has {LAYERS} layers"):
        check_self_draft(EngineConfig(drafting="self", self_draft_skip=(f"mlp.{LAYERS}",)), target)
