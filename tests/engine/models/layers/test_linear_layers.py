"""Linear layers: a flat pass over rows of several contexts computes what transformers computes for each."""

import functools
import sys
from functools import partial

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.models.first_layers import first_layers
from engine.models.layers.linear_layers import planned_states, prepare_linear_layers
from engine.protocols import SlotRow
from tests.engine.hybrids.models import HYBRIDS
from tests.engine.tiny import SIZES, backend_of, save

LENGTHS = [19, 3, 1, 8]
CONTEXTS = [torch.randint(2, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


def config_of(name, **settings):
    cls = getattr(transformers, f"{name}Config", None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    known = {key: value for key, value in HYBRIDS[name].items() if key in cls.__dataclass_fields__}
    return cls(**SIZES | known | settings)


@pytest.fixture(scope="module", params=HYBRIDS)
def path(request, tmp_path_factory):
    return save(config_of(request.param), tmp_path_factory.mktemp("model"), factor=2.0)


def loaded(path):
    """The model's backend; in older versions of transformers, not every layer hands its keywords on."""
    try:
        return backend_of(path)
    except ModelError as error:
        if "hands no keywords" not in str(error) or transformers.__version__ >= "5.23":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def backend(path):
    return loaded(path)


@pytest.fixture(scope="module")
def reference(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def rows(first, end, prompts, depth=0):
    """Rows of each context's tokens [first, end), in its own slot and blocks; the last `depth` are a draft."""
    made = []
    for i, (context, prompt) in enumerate(zip(CONTEXTS, prompts, strict=True)):
        if tokens := context[first:end]:
            state = SlotRow(1 + i, 1 + i if first else 0)
            drafted = {"num_draft_tokens": min(depth, len(tokens) - 1), "num_logits": len(tokens)}
            made.append(
                ForwardRow(
                    tokens, first, [1 + 8 * i + j for j in range(8)], prompt_length=prompt, slot=state, **drafted
                )
            )
    return made


def run(backend, passes):
    """The logits of each context's tokens after these passes."""
    kv = backend.allocate_kv(40, 4, 6, 8)
    outputs = [backend.logits(build(one, kv)).split([len(row.token_ids) for row in one]) for one in passes]
    found = [[] for _ in CONTEXTS]
    for one, logits in zip(passes, outputs, strict=True):
        for row, part in zip(one, logits, strict=True):
            found[row.slot.slot - 1].append(part)
    return [torch.cat(parts) for parts in found]


def check(found, reference, atol=1e-4):
    for context, logits in zip(CONTEXTS, found, strict=True):
        torch.testing.assert_close(
            logits, reference(torch.tensor([context]), use_cache=False).logits[0], atol=atol, rtol=0
        )


@torch.inference_mode()
def test_a_flat_pass_computes_what_transformers_computes_of_each_context(backend, reference):
    check(run(backend, [rows(0, 19, LENGTHS)]), reference)
    check(run(backend, [rows(0, 8, LENGTHS), rows(8, 16, LENGTHS), rows(16, 19, LENGTHS)]), reference)  # at chunks
    check(run(backend, [rows(0, 2, [2] * 4), rows(2, 19, [2] * 4, depth=8)]), reference)  # step by step


@torch.inference_mode()
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_first_layers_have_the_states_and_keys_of_these_layers(count, backend, path):
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    layers = next(child for child in whole.modules() if isinstance(child, torch.nn.ModuleList))
    if count >= len(layers):
        pytest.skip("the model has no more layers")
    del layers[count:]
    part = backend.beside(partial(first_layers, count=count), backend.allocate_kv(40, 4, 6, 8))[0]
    assert part.model.state_shapes == backend.model.state_shapes[: len(part.model.state_shapes)]
    check(run(part, [rows(0, 19, LENGTHS)]), whole)


def test_planned_states_are_those_of_the_loaded_model(backend):
    shapes, chunk = planned_states(backend.model.config)
    assert list(backend.model.state_shapes) == shapes
    assert backend.info.state_chunk == chunk
    assert backend.model.why_eager(backend.model.config) == "it has linear layers"


def test_a_model_whose_layers_are_not_those_of_its_configuration_is_refused():
    config = config_of("Lfm2")
    module = AutoModelForCausalLM.from_config(config)
    config.layer_types = ["conv"] * 4
    with pytest.raises(ModelError, match=r"has 2 linear layers and 2 with attention.* names 4 and 0"):
        prepare_linear_layers(module, config)


@pytest.mark.parametrize(("name", "attribute"), [("Qwen3Next", "linear_attn"), ("Lfm2", "conv")])
def test_layers_that_hand_no_keywords_to_their_functions_are_refused(name, attribute, monkeypatch):
    """Older versions of transformers have such layers, and later ones may call other functions."""
    config = config_of(name)
    module = AutoModelForCausalLM.from_config(config)
    mixer = type(getattr(module.model.layers[0], attribute))
    forwards = [lambda self, x: x, lambda self, x, **keywords: x, _convolves_only]
    for forward in forwards if name == "Qwen3Next" else forwards[:2]:
        with monkeypatch.context() as patched:
            functools.update_wrapper(forward, mixer.forward)
            patched.setattr(mixer, "forward", forward)
            with pytest.raises(ModelError, match="hands no keywords to its functions"):
                prepare_linear_layers(module, config)


def _convolves_only(self, x, **keywords):
    causal_conv1d_fn = vars(sys.modules[type(self).__module__])["causal_conv1d_fn"]
    causal_conv1d_fn(self.in_proj_qkvz(x).transpose(1, 2)[:, :80], self.conv1d.weight.squeeze(1), **keywords)
    return x


@torch.inference_mode()
def test_a_pass_whose_context_does_not_arrive_is_refused(backend):
    mixer = next(child for child in backend.model.module.modules() if hasattr(child, "state_layer"))
    with pytest.raises(ModelError, match="do not pass keyword arguments on to their linear layers"):
        mixer(torch.zeros(1, 2, SIZES["hidden_size"]))
