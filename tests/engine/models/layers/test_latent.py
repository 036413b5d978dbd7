"""Latent attention, absorbed: transformers' own texts, whatever the lengths of rows, from a cache without values."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.execution.kv_tensors import KVTensors
from engine.models.layers.latent import LatentProjection, cache_latents
from engine.models.layers.layer_attention import KVShape
from engine.models.layers.quantization import QuantizedLinear
from engine.params import SamplingParams
from tests.engine.running import chains, make_engine, run
from tests.engine.test_zoo import expected
from tests.engine.tiny import EXPERTS, LATENT, LONGCAT, SIZES, backend_of, model_of, save
from tests.fakes import TreeDrafter

BLOCK = 8
FAMILIES = {
    **dict.fromkeys(("DeepseekV2", "DeepseekV3", "MiniCPM3"), EXPERTS | LATENT),
    "LongcatFlash": LATENT | {"n_routed_experts": 4} | LONGCAT,
}
TEXT = torch.randint(2, 64, (60,), generator=torch.Generator().manual_seed(3)).tolist()


def config_of(family):
    cls = getattr(transformers, f"{family}Config")
    fields = cls.__dataclass_fields__.keys() - ({"num_hidden_layers"} if family == "LongcatFlash" else set())
    return cls(**{key: value for key, value in (SIZES | FAMILIES[family]).items() if key in fields})


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    return save(config_of(request.param), tmp_path_factory.mktemp(request.param), factor=2.0)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return save(config_of("DeepseekV3"), tmp_path_factory.mktemp("deepseek"), factor=3.0)


def logits_in_rows(backend, lengths):
    """The logits of every token of the text, in rows of these lengths."""
    kv, blocks, start, parts = backend.allocate_kv(10, BLOCK), [3, 1, 7, 2, 9, 4, 8, 6], 0, []
    for length in lengths:
        row = ForwardRow(TEXT[start : start + length], start, blocks, length)
        parts.append(backend.run(build([row], kv)).logits)
        start += length
    return torch.cat(parts)


@torch.inference_mode()
def test_the_absorbed_form_computes_what_the_expanded_one_does(path):
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    expected = module(torch.tensor([TEXT])).logits[0]
    backend = EagerBackend(model_of(path))
    for lengths in (
        [60],
        [20, 35, 5],
        [13] + [1] * 47,
        [2, 3, 4, 5, 6, 7, 8, 9, 16],
    ):  # with a chunk of its own kind behind cached tokens
        difference = (logits_in_rows(backend, lengths) - expected).abs().max()
        assert difference < 1e-5 * expected.abs().max(), lengths
    assert {tensor.shape[-2:] for tensor in backend.allocate_kv(2, BLOCK).keys} == {(1, 24)}


def test_texts_are_transformers_own_with_chains_and_trees(deepseek):
    written = expected(deepseek, [TEXT[i : 20 + i] for i in range(2)], 12)[0]
    texts = {str(i): text for i, text in enumerate(written)}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    requests = [(TEXT[i : 20 + i], params) for i in range(2)]
    backend = backend_of(deepseek)
    right = [token for text in texts.values() for token in text]
    for drafter, k in ((None, 0), (chains(backend), 4), (lambda _: TreeDrafter(right), 4)):
        engine = make_engine(backend, drafter, num_speculative_tokens=k)
        assert run(engine, requests) == texts
        assert (engine.stats.num_accepted_tokens > 0) == (k > 0)


def test_an_accepted_path_moves_once():
    """Slot 6 moves to 5 after 5 has moved to 4; moving the same numbers again as values would spoil both."""
    kv = KVTensors(KVShape(1, 1, 2, 0), 2, BLOCK, torch.empty(0))
    kv.keys[0].view(-1, 2).copy_(torch.arange(16).unsqueeze(1))
    kv.move([5, 6], [4, 5])
    assert kv.keys[0].view(-1, 2)[4:7, 0].tolist() == [5, 6, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_the_layer_quantised_or_not(dtype):
    layer = torch.nn.Linear(16, 3 * (4 + 2), bias=False, dtype=dtype)
    scales = layer.weight.detach().abs().amax(1, keepdim=True) / 127
    rounded = QuantizedLinear((layer.weight.detach() / scales).round().to(torch.int8), scales, None)
    for one in (layer, rounded):
        latents = LatentProjection(one, 4, 2, torch.ones(16, dtype=dtype))
        generator = torch.Generator().manual_seed(0)
        query, latent = (torch.randn(3, 5, size, generator=generator).to(dtype) for size in (4 + 7, 16))
        keys, values = one(latent[0]).view(5, 3, 6).transpose(0, 1).split([4, 2], -1)
        rotated = query[..., 4:]
        expected = (query[..., :4] * keys).sum(-1)
        found = (latents.query(query) * torch.cat([latent[:1].expand(3, -1, -1), rotated], -1)).sum(-1)
        tolerance = 1e-5 if dtype == torch.float32 else 0.2
        torch.testing.assert_close(found - (rotated * rotated).sum(-1), expected, rtol=tolerance, atol=tolerance)
        cached = torch.cat([latent[0], rotated[0]], -1).unsqueeze(1).expand(-1, 3, -1)
        torch.testing.assert_close(latents.output(cached), values.transpose(0, 1), rtol=tolerance, atol=tolerance)


def test_latents_that_cannot_be_reached_are_refused():
    layer = torch.nn.Module()
    layer.kv_lora_rank = 16
    with pytest.raises(ModelError, match="Module has latents, but transformers gives no access to them"):
        cache_latents(layer)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_passes_compute_the_same(deepseek):
    backend = backend_of(deepseek)
    expected = logits_in_rows(backend, [20, 40])
    backend.compile()
    for lengths in ([60], [20, 17, 5, 18], [13] + [1] * 47):
        torch.testing.assert_close(logits_in_rows(backend, lengths), expected, rtol=1e-4, atol=1e-4)
