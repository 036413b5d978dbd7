"""Compiled passes: the same logits as the eager ones, the same text with and without speculation, eager where not."""

import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from engine.config import ModelConfig
from engine.drafting.model import ModelDrafter
from engine.drafting.run_ahead.drafter import RunAheadDrafter
from engine.execution.batch import ForwardRow, build
from engine.execution.cpu import packages as compilation
from engine.execution.cpu.compiled import PIECE_LENGTH, CompiledForward, CompileError, can_run, example, pieces, samples
from engine.execution.cpu.half_weights import PanelLinear
from engine.execution.cpu.paged_attention import suits
from engine.models.causal_lm import CausalLM
from engine.models.fusion import FusedLinear
from engine.sampling import noise
from engine.sampling.grammar import Grammars, from_regex
from engine.sampling.params import SamplingParams
from tests.engine.conftest import VOCAB, save_llama
from tests.engine.running import make_engine, run
from tests.engine.tiny import SIZES, save
from tests.engine.tokenizers import END, json_tokenizer, saved
from tests.fakes import InterruptedDrafter, TreeDrafter

# torch's exporter warns of parts of itself.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")]
needs_compiler = pytest.mark.skipif(not compilation.has_compiler(), reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def own_noise(cache):
    yield
    noise.use(None)


def load(path):
    return CausalLM.load(ModelConfig(path, dtype="float32", device="cpu"))


def save_windowed(path, *, seed):
    """One layer attends to all, the other through a window: one package has both."""
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=1)
    return save(config, path, seed=seed)


@pytest.fixture(scope="session")
def windowed_path(tmp_path_factory):
    return save_windowed(tmp_path_factory.mktemp("windowed"), seed=1)


@pytest.fixture(params=["16-bit weights", "32-bit weights"])
def path(request, windowed_path, tmp_path):
    """A model whose linear layers run with half weights, and one whose weights need their 32 bits."""
    if request.param == "32-bit weights":
        return windowed_path
    # Its heads are large enough for attention in C++, which those of the other are not.
    module = AutoModelForCausalLM.from_pretrained(save_llama(tmp_path, seed=1, hidden=64), dtype=torch.bfloat16)
    module.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.slow
@needs_compiler
def test_compiled_text_does_not_depend_on_the_draft(path, request, tmp_path):
    model = load(path)
    loaded = [weakref.ref(layer.weight) for layer in model.module.modules() if type(layer) is nn.Linear]
    model.compile()
    assert model.is_compiled
    has_halves = any(isinstance(child, PanelLinear) for child in model._step.modules())
    assert has_halves == ("16-bit weights" in request.node.name)
    gc.collect()
    assert {weight() is None for weight in loaded} == {has_halves}  # nobody keeps those that others replace
    assert suits(model.kv_shape[2], model.dtype) == has_halves
    generator = torch.Generator().manual_seed(0)
    requests = []
    for i in range(60):
        length = 3 + i % 40 + 130 * (i % 10 == 0)  # some are longer than a piece
        prompt = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
        temperature = (0.0, 0.7, 1.0)[i % 3]
        # What the pass draws by itself, and in the same batch what it cannot.
        more = {"ignore_eos": True}
        if i % 4 == 0:
            more |= {"top_p": 0.8, "presence_penalty": 0.5}
        if i % 8 == 2:
            more = {"grammar": from_regex("[a-z0-9 ]{300}")}
        if i % 8 == 3:
            more |= {"prompt_logprobs": 1}
        requests.append((prompt, SamplingParams(temperature=temperature, seed=i, max_tokens=24, **more)))
    grammars = Grammars(saved(json_tokenizer(), tmp_path / "tokenizer"), vocab_size=VOCAB, eos_token_ids=[END])
    plain = run(make_engine(model, grammars=grammars, num_speculative_tokens=0), requests)
    for drafter in (
        lambda config: ModelDrafter(model, config, grammars=grammars),
        lambda config: InterruptedDrafter(RunAheadDrafter(model, config, grammars=grammars)),
        lambda _: TreeDrafter(range(2, 20)),
    ):
        engine = make_engine(model, drafter, grammars=grammars, num_speculative_tokens=4)
        assert run(engine, requests) == plain
        assert engine.stats.acceptance_rate > (0.98 if type(engine.drafter) is not TreeDrafter else 0)
    noise.use(None)
    eager = run(make_engine(load(path), grammars=grammars, num_speculative_tokens=0), requests)
    assert sum(eager[name] == plain[name] for name in plain) >= 58  # a rounding may tip a near-tie


def mixed_rows():
    """Prompts from their start and from the middle, longer than two pieces, among short rows and a tree."""
    ids = torch.randint(2, VOCAB, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    tables = torch.arange(1, 60).flip(0).tolist()
    return [
        ForwardRow(ids[:300], 0, tables[:20], 2),
        ForwardRow(ids[300:301], 20, tables[20:22], 1),
        ForwardRow(ids[310:586], 40, tables[22:42], 276),
        ForwardRow(ids[600:606], 9, tables[42:43], 4, parents=[-1, -1, 0, 1]),
        ForwardRow(ids[620:690], 3, tables[43:48], 0),
    ]


def both_caches(model):
    kv, others = model.kv_tensors(60, 16), model.kv_tensors(60, 16)
    for cache, other in zip((*kv.keys, *kv.values), (*others.keys, *others.values), strict=True):
        other.copy_(cache.normal_())
    return kv, others


def assert_same_caches(kv, others):
    for cache, other in zip((*kv.keys, *kv.values), (*others.keys, *others.values), strict=True):
        assert torch.allclose(cache[1:], other[1:], atol=1e-5)  # padding goes to block 0


@pytest.mark.parametrize("window", [None, 24])
def test_pieces_compute_what_the_whole_batch_does(window, tmp_path):
    save(MistralConfig(**SIZES, sliding_window=window), tmp_path)
    model = load(str(tmp_path))
    kv, others = both_caches(model)
    batch = build(mixed_rows(), kv)
    with torch.inference_mode():
        expected = model._forward_eagerly(build(mixed_rows(), others))
        found = torch.full_like(expected, float("nan"))
        lengths = []
        for piece, where in pieces(batch):
            found[where] = model._forward_eagerly(piece)
            lengths.append(len(piece.token_ids))
    assert max(lengths) == PIECE_LENGTH
    assert sum(lengths) == len(batch.token_ids)
    assert (found - expected).abs().max() < 1e-4
    assert_same_caches(kv, others)


@pytest.mark.slow
@needs_compiler
def test_prompts_run_compiled_however_many_threads_there_are(windowed_path, monkeypatch):
    model = load(windowed_path)
    model.compile()
    kv, others = both_caches(model)
    with torch.inference_mode():
        expected = model._forward_eagerly(build(mixed_rows(), others))
    monkeypatch.setattr(model, "_forward_eagerly", lambda batch: pytest.fail("it ran eagerly"))
    for count in (2, 1):
        torch.set_num_threads(count)
        assert (model.forward(build(mixed_rows(), kv)) - expected).abs().max() < 1e-4
        assert_same_caches(kv, others)


@pytest.mark.slow
@needs_compiler
def test_windows_compile(windowed_path):
    model = load(windowed_path)
    model.compile()  # compares with the eager pass itself
    kv, others = model.kv_tensors(16, 16), model.kv_tensors(16, 16)
    rows = [ForwardRow(list(range(2, 2 + n)), 20 + n, [2 * n, 2 * n + 1, 15], n) for n in (1, 2, 5)]
    for cache, other in zip((*kv.keys, *kv.values), (*others.keys, *others.values), strict=True):
        other.copy_(cache.normal_())
    with torch.inference_mode():
        found, expected = model.forward(build(rows, kv)), model._forward_eagerly(build(rows, others))
    assert (found - expected).abs().max() < 1e-4
    for cache, other in zip((*kv.keys, *kv.values), (*others.keys, *others.values), strict=True):
        assert torch.allclose(cache, other, atol=1e-5)  # what was written counts as much as what was returned


@pytest.mark.slow
@needs_compiler
def test_other_weights_use_the_same_package_and_a_wrong_package_is_refused(windowed_path, tmp_path, caplog):
    model = load(windowed_path)
    model.compile()
    path = model._package
    before = path.stat().st_mtime_ns
    other = load(save_windowed(tmp_path / "other", seed=9))
    other.compile()
    assert path.stat().st_mtime_ns == before
    candidate = CompiledForward(path, other._step)
    batch = build(samples()[0], other.kv_tensors(16, 16))
    with torch.inference_mode(), pytest.raises(CompileError, match="differs from the eager one"):
        candidate.check(batch, model._forward_eagerly(batch))
    path.write_bytes(b"no package")
    with caplog.at_level(logging.WARNING):
        again = CausalLM.load(ModelConfig(windowed_path, dtype="float32", device="cpu", compile="auto"))
    assert not again.is_compiled
    assert "runs eagerly" in caplog.text
    path.unlink()


def test_without_a_compiler_it_runs_eagerly(target_path, monkeypatch, caplog):
    monkeypatch.setattr("engine.execution.cpu.packages.has_compiler", lambda: False)
    with caplog.at_level(logging.INFO):
        model = CausalLM.load(ModelConfig(target_path, dtype="float32", device="cpu", compile="auto"))
    assert not model.is_compiled
    assert "there is no C++ compiler" in caplog.text


def test_one_pass_computes_short_rows_only(target):
    kv = target.kv_tensors(16, 16)
    assert can_run(example(kv)[0])
    assert can_run(build([ForwardRow([3] * 20, 0, [1, 2], 1)], kv))
    assert can_run(build([ForwardRow([3] * PIECE_LENGTH, 16, list(range(1, 10)), 1)], kv))
    assert not can_run(build([ForwardRow([3] * (PIECE_LENGTH + 1), 16, list(range(1, 11)), 1)], kv))
    assert not can_run(build([ForwardRow([3], 5, [1], 1), ForwardRow([3] * 20, 0, [1, 2], 1)], kv))


class Fixed(torch.nn.Module):
    """Has a size taken for a number while it is traced."""

    def forward(self, x):
        return x.new_ones(len(x)) + x


@needs_compiler
def test_a_size_that_tracing_fixed_is_found(tmp_path):
    with pytest.raises(compilation.CompileError, match="dimension 0 of x is not symbolic"):
        compilation._compile(Fixed(), (torch.ones(5),), ({0: torch.export.Dim.AUTO},), tmp_path / "package.pt2")


def test_what_is_in_the_cache_needs_no_right_to_write_there(tmp_path):
    path = tmp_path / "package.pt2"
    path.touch()
    path.with_suffix(".lock").mkdir()  # root may write everywhere
    compilation.compile_once(path, pytest.fail)


def test_a_package_is_checked_beside_passes_that_are_under_way(target_path, monkeypatch):
    """Fused layers keep parts of a pass between two calls; those of a pass that is being served must stay."""
    model = load(target_path)
    fused = [layer for layer in model.module.modules() if isinstance(layer, FusedLinear)]
    for layer in fused:
        layer.pending = [torch.ones(1)]
    candidate = SimpleNamespace(check=lambda batch, expected: None)
    monkeypatch.setattr("engine.models.causal_lm.CompiledForward", lambda *_: candidate)
    monkeypatch.setattr("engine.models.causal_lm.load_noise", lambda _: None)
    monkeypatch.setattr(compilation, "load_kernels", lambda: None)
    model._adopt()
    assert model.is_compiled
    assert fused
    assert [len(layer.pending) for layer in fused] == [1] * len(fused)
