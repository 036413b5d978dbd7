"""The first layers compute what transformers computes of the same weights without the later layers."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPTNeoXConfig, LlamaConfig

from engine.config import EngineConfig, ModelConfig
from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.models.first_layers import check_self_draft, first_layers
from engine.models.registry import open_model
from tests.engine.tiny import HEADS, SIZES, backend_of, save

LAYERS = 4
CONFIGS = {
    "gemma2": Gemma2Config(**SIZES | HEADS | {"num_hidden_layers": LAYERS, "sliding_window": 6}),
    "gpt_neox": GPTNeoXConfig(**SIZES | {"num_hidden_layers": LAYERS, "num_key_value_heads": 4}),
}
TOKENS = [5, 9, 2, 7, 30, 12, 8, 8, 3, 21]


@pytest.fixture(scope="module", params=CONFIGS)
def path(request, tmp_path_factory):
    return save(CONFIGS[request.param], tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def backend(path):
    return backend_of(path)


def layers_of(module):
    """The path and the list of a model's decoder layers."""
    return next((path, child) for path, child in module.named_modules() if isinstance(child, torch.nn.ModuleList))


def reference(path, num_layers):
    """The logits of transformers' own model after its later layers are deleted."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    del layers_of(model)[1][num_layers:]
    with torch.inference_mode():
        return model(torch.tensor([TOKENS]), use_cache=False).logits[0]


@torch.inference_mode()
@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_first_layers_compute_what_transformers_computes_without_the_others(num_layers, path, backend):
    """Chunk by chunk, over the whole model's keys and values of these layers."""
    kv = backend.allocate_kv(8, 4)
    thinned, seen = backend.beside(partial(first_layers, count=num_layers), kv)
    logits = [
        thinned.run(build([ForwardRow(TOKENS[start:end], start, [3, 1, 5], end - start)], seen)).logits
        for start, end in ((0, 5), (5, 9), (9, 10))
    ]
    torch.testing.assert_close(torch.cat(logits), reference(path, num_layers), atol=1e-4, rtol=1e-4)
    assert [layer for layer in range(LAYERS) if kv.keys[layer].any()] == list(range(num_layers))
    whole = backend.run(build([ForwardRow(TOKENS, 0, [3, 1, 5], len(TOKENS))], kv)).logits
    torch.testing.assert_close(whole, reference(path, LAYERS), atol=1e-4, rtol=1e-4)


def test_both_share_their_weights_but_no_module_that_one_may_compile_and_the_whole_model_stays_as_it_is(backend):
    names = [name for name, _ in backend.model.module.named_modules()]
    first = first_layers(backend.model, 1)
    assert [name for name, _ in backend.model.module.named_modules()] == names
    weights = {id(parameter) for parameter in backend.model.module.parameters()}
    assert {id(parameter) for parameter in first.module.parameters()} < weights
    num_left = sum(parameter.numel() for parameter in first.module.parameters())
    assert first.info.num_parameters == num_left < backend.info.num_parameters
    _, (whole, kept) = zip(layers_of(backend.model.module), layers_of(first.module), strict=True)
    assert (len(whole), len(kept)) == (LAYERS, 1)
    assert whole[0] is not kept[0]
    inner = {child for layer in kept for child in layer.modules()}
    outer = {child for child in first.module.modules() if "Norm" in type(child).__name__} - inner
    assert outer
    assert not outer & {*backend.model.module.modules()}


def test_the_layers_are_checked_before_anything_is_loaded(path, tmp_path, monkeypatch):
    monkeypatch.setattr(EagerBackend, "__init__", None)
    target = open_model(ModelConfig(path, device="cpu"))
    check_self_draft(EngineConfig(drafting="self", self_draft_layers=LAYERS - 1), target)
    check_self_draft(EngineConfig(), open_model(ModelConfig("/nowhere")))
    with pytest.raises(ModelError, match=f"self_draft_layers is {LAYERS}; it must be at most {LAYERS - 1}, because"):
        check_self_draft(EngineConfig(drafting="self", self_draft_layers=LAYERS), target)

    single = open_model(ModelConfig(save(LlamaConfig(**SIZES | {"num_hidden_layers": 1}), tmp_path)))
    with pytest.raises(ModelError, match=r"self_draft_layers is 1; it cannot be used, because .* has 1 layers"):
        check_self_draft(EngineConfig(drafting="self", self_draft_layers=1), single)
