"""The CPU's backend: compiled where that pays and eager where not, the same tokens either way, 16-bit weights kept."""

import gc
import logging
import re
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.config import CompileProgress, EngineConfig
from engine.drafting.learning.learner import Learner
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.registry import METHODS
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.execution.batch import ForwardRow, build
from engine.execution.cpu import cpu_backend
from engine.execution.cpu.compilation import packages
from engine.execution.cpu.compilation.compiled_forward import CompiledForward, CompileError, can_run
from engine.execution.cpu.cpu_backend import CpuBackend
from engine.execution.cpu.kernels.paged_attention import suits
from engine.execution.cpu.kernels.panel_linear import PanelLinear
from engine.models.causal_lm import Shard
from engine.models.first_layers import first_layers
from engine.params import SamplingParams
from engine.protocols import Draft, Request, VerifyRow, run_in_process
from engine.sampling import noise
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_text import from_regex
from engine.sampling.noise import Draws
from engine.verification.verifier import ModelVerifier
from tests.engine.conftest import VOCAB, save_llama
from tests.engine.drafting.learning.texts import changed
from tests.engine.execution.cpu.batches import assert_copies_no_cache, assert_same_caches, both_caches, mixed_rows
from tests.engine.heads.tiny_heads import backend_with_head, head_config
from tests.engine.ranks import AbsentOthers
from tests.engine.running import make_engine, run
from tests.engine.tiny import SIZES, backend_of, save
from tests.engine.tokenizers import END, json_tokenizer, saved
from tests.fakes import InterruptedDrafter, TreeDrafter

# torch's exporter warns of parts of itself.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")]
needs_compiler = pytest.mark.skipif(not packages.has_compiler(), reason="there is no C++ compiler")


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("quantization", ["none", "int4"], ids=["16-bit and 32-bit weights", "4-bit weights"])
def test_compiled_text_does_not_depend_on_the_draft(quantization, mixed_path, tmp_path):
    """The quantised model has heads that are too small for attention in C++."""
    path = mixed_path if quantization == "none" else save(LlamaConfig(**SIZES), tmp_path)
    backend = backend_of(path, quantization=quantization)
    weights = [layer.weight for layer in backend.model.module.modules() if type(layer) is nn.Linear]
    are_exact = [(weakref.ref(weight), torch.equal(weight.bfloat16().float(), weight)) for weight in weights]
    del weights
    backend.compile()
    assert_copies_no_cache(backend)
    dtypes = {child.panels.dtype for child in backend._step.modules() if isinstance(child, PanelLinear)}
    assert dtypes == {torch.bfloat16 if quantization == "none" else torch.uint8}
    gc.collect()
    assert all((weight() is None) == replaced for weight, replaced in are_exact), "nobody keeps those"
    assert suits(backend.model.kv_shape.key_dim, backend.model.dtype) == (quantization == "none")
    texts, requests = torch.randint(2, VOCAB, (60, 200), generator=torch.Generator().manual_seed(0)).tolist(), []
    for i, text in enumerate(texts):  # some are longer than a piece
        # What the pass draws by itself, and in the same batch what it cannot.
        more = {"grammar": from_regex("[a-z0-9 ]{300}")} if i % 8 == 2 else {"ignore_eos": True}
        more |= {"top_p": 0.8, "presence_penalty": 0.5} if i % 4 == 0 else {}
        params = SamplingParams(temperature=(0.0, 0.7, 1.0)[i % 3], seed=i, max_tokens=24, **more)
        requests.append((text[: 3 + i % 40 + 130 * (i % 10 == 0)], params))
    grammars = Grammars(saved(json_tokenizer(), tmp_path / "tokenizer"), vocab_size=VOCAB, eos_token_ids=[END])
    plain = run(make_engine(backend, grammars=grammars, num_speculative_tokens=0), requests)
    for drafter, least in (
        (lambda config: InterruptedDrafter(RunAheadDrafter(DraftModel(backend, grammars=grammars), config)), 0.98),
        (lambda _: TreeDrafter(range(2, 20)), 0),
    ):
        engine = make_engine(backend, drafter, grammars=grammars, num_speculative_tokens=4)
        assert run(engine, requests) == plain
        assert engine.stats.num_accepted_tokens > least * engine.stats.num_draft_tokens
    noise.IMPLEMENTATIONS.clear()
    eager = backend_of(path, quantization=quantization)
    texts = run(make_engine(eager, grammars=grammars, num_speculative_tokens=0), requests)
    assert sum(texts[name] == plain[name] for name in plain) >= 58  # a rounding may tip a near-tie


class EagerPasses(CompiledForward):
    """Computes eagerly what a package computes compiled: one group of short rows, and draws."""

    def __init__(self, backend):
        self.eager = CpuBackend(backend.model, backend._source)
        self.num_calls = 0

    def __call__(self, batch, draws=None):
        assert can_run(batch)
        self.num_calls += 1
        return tuple(self.eager.run(batch, draws))


def draws_for(count):
    """Every third row is greedy; the others have temperatures and seeds of their own."""
    keys = noise.keys(range(count), range(count), noise.TARGET_STREAM, torch.device("cpu"))
    rows = torch.tensor([0 if row % 3 == 0 else row + 1 for row in range(count)])
    return Draws(torch.where(rows > 0, torch.linspace(0.5, 1.5, count), 1.0).unsqueeze(-1), keys, rows)


@pytest.mark.parametrize("has_draws", [True, False])
@pytest.mark.parametrize("num_passes", [1, 8])
def test_a_compiled_backend_draws_the_tokens_that_an_eager_one_draws(num_passes, has_draws, target_path):
    rows = mixed_rows() if num_passes > 1 else mixed_rows()[1:4:2]  # a short row and a tree
    backend = backend_of(target_path)
    kv, others = both_caches(backend)
    draws = draws_for(sum(row.num_logits for row in rows)) if has_draws else None
    expected = backend.run(build(rows, others), draws)
    backend._compiled = passes = EagerPasses(backend)
    logits, scores, tokens = backend.run(build(rows, kv), draws)
    assert passes.num_calls == num_passes
    assert torch.allclose(logits, expected.logits, atol=1e-4)
    assert torch.allclose(scores, expected.scores, atol=1e-4)
    assert torch.equal(tokens, expected.tokens)
    assert torch.equal(scores, logits) == (not has_draws)
    assert_same_caches(kv, others)


@pytest.mark.long
@needs_compiler
@torch.inference_mode()
def test_a_compiled_target_and_its_compiled_head_draft_what_eager_ones_draft(target_path):
    eager, compiled = (backend_with_head(target_path, head_config(draft_vocab=20)) for _ in range(2))
    unpacked = weakref.ref(compiled.model.head)
    config = EngineConfig(num_blocks=20, block_size=4, drafting="head")
    verifiers = [ModelVerifier(one, config, None, METHODS["head"].make_in_target) for one in (eager, compiled)]
    (beside,) = compiled._beside
    compiled.compile()
    beside.compile()
    gc.collect()
    assert unpacked() is None, "nobody keeps the weights that are packed"
    assert beside.model.head is beside.model.module
    assert beside._package != compiled._package
    for one in (compiled, beside):
        one.logits = None  # no eager pass
        assert_copies_no_cache(one)
    text = [5, 9, 2, 7, 30, 12, 44, 8, 3, 21, 17]
    for start, end, count in ((0, 7, 0), (7, 10, 0), (10, 11, 4)):
        request = Request("r", text[:end], end, SamplingParams(temperature=0.0, max_tokens=64))
        row = VerifyRow(request, start, end - start, [*range(1, 9)], Draft(num_deferred=count))
        found, right = (run_in_process(verifier.verify([row]))[0] for verifier in verifiers)
        assert (found.token_ids, found.draft) == (right.token_ids, right.draft)
    assert len(found.draft.token_ids) == 4


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A machine with a compiler on which nothing was compiled; the list notes what is compiled in the background."""
    monkeypatch.setattr(packages, "has_compiler", lambda: True)
    monkeypatch.setenv(packages.CACHE_VARIABLE, str(tmp_path / "cache"))
    started = []
    monkeypatch.setattr(cpu_backend, "BackgroundCompiler", lambda *args, **options: started.append((*args, options)))
    return started


def fill(backend, content=b"no package"):
    for path in backend._package_files:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


REASONS = {
    "one of several ranks": "it is one of several ranks",
    "too large": "it is bound by memory, not by calls",
    "no compiler": "there is no C++ compiler",
}


@pytest.mark.parametrize("name", REASONS)
def test_where_compiling_does_not_pay_it_stays_eager_and_says_why(name, target_path, empty_cache, monkeypatch, caplog):
    monkeypatch.setattr(packages, "has_compiler", lambda: name != "no compiler")
    monkeypatch.setattr(packages, "MAX_BYTES", 1 if name == "too large" else 2**31)
    shard = Shard(0, 2, AbsentOthers()) if name == "one of several ranks" else None
    backend = backend_of(target_path, shard, compile="auto")
    with caplog.at_level(logging.INFO):
        backend.warm_up()
    assert f"{target_path} runs eagerly: {REASONS[name]}" in caplog.text
    assert (backend._compiled, empty_cache) == (None, [])
    with pytest.raises(CompileError, match=re.escape(REASONS[name])):
        backend.compile()


@pytest.mark.parametrize(
    ("compile", "may_compile", "num_missing", "is_compiled"),
    [("auto", True, 3, True), ("auto", True, 1, True), ("auto", False, 3, False), ("auto", True, 0, False),
     ("off", True, 0, False)],
)  # fmt: skip
def test_what_is_missing_is_compiled_in_the_background_and_a_broken_package_is_not(
    compile, may_compile, num_missing, is_compiled, empty_cache, target_path, caplog
):
    backend = backend_of(target_path, compile=compile)
    fill(backend)
    for path in backend._package_files[:num_missing]:
        path.unlink()
    backend.warm_up(compile_missing=may_compile)
    assert bool(empty_cache) == is_compiled
    has_tried = compile == "auto" and num_missing == 0
    if is_compiled:
        ((source, dtype, parts, ready, options),) = empty_cache
        assert (source.path, dtype, parts) == (target_path, "float32", backend._package_files)
        assert options == {"num_layers": 2, "is_self_draft": False}
        fill(backend)
        ready()
        has_tried = True
    assert (f"{target_path} runs eagerly: " in caplog.text) == has_tried
    assert backend.run(build([ForwardRow([3, 4], 0, [1], 1)], backend.allocate_kv(2, 16))).tokens.shape == (1,)


def test_a_backend_says_how_far_its_models_are(empty_cache, target_path, monkeypatch):
    def compiler(*_, num_layers, **options):
        return SimpleNamespace(progress=CompileProgress(0, 3, 2.0 * num_layers) if num_layers == 1 else None)

    monkeypatch.setattr(cpu_backend, "BackgroundCompiler", compiler)
    backend = backend_of(target_path, compile="auto")
    backend.beside(partial(first_layers, count=1), backend.allocate_kv(4, 16))
    assert backend.compiling == []
    backend.warm_up()
    assert backend.compiling == [CompileProgress(0, 3, 2.0)], "of the two, only the first layers are still compiled"


class CopyingPasses:
    """A package whose passes take time for every block of the cache, as one that copies it."""

    def __init__(self, *_):
        self.check = lambda *_: None

    def __call__(self, batch):
        time.sleep(1e-5 * (len(batch.paged.kv.keys[0]) - 16))


@pytest.mark.parametrize("num_blocks", [16, 5000])
@pytest.mark.parametrize("is_part", [False, True])
def test_compiled_passes_are_taken_only_if_they_are_faster_over_the_served_cache(
    num_blocks, is_part, empty_cache, target_path, monkeypatch, caplog
):
    monkeypatch.setattr(cpu_backend, "CompiledForward", CopyingPasses)
    monkeypatch.setattr(packages, "load_kernels", lambda: None)
    monkeypatch.setattr(cpu_backend, "load_noise", lambda path: None)
    backend = backend_of(target_path, compile="auto")
    kv = backend.allocate_kv(num_blocks, 16)
    if is_part:
        backend, kv = backend.beside(partial(first_layers, count=1), kv)
    kv.keys[0][1:].fill_(7.0)
    fill(backend)
    backend.warm_up()
    assert (backend._compiled is not None) == (num_blocks == 16)
    assert ("runs eagerly: a compiled pass takes " in caplog.text) == (num_blocks == 5000)
    assert kv.keys[0][1:].unique().tolist() == [7.0], "it may be in use"


@pytest.fixture(params=["a library", "a broken library", "no compiler"])
def has_library(request, monkeypatch):
    """Whether this machine has the library that multiplies rows by 16-bit weights."""
    if "library" in request.param and not packages.has_compiler():
        pytest.skip("there is no C++ compiler")
    if request.param == "a broken library":
        monkeypatch.setattr(packages, "kernels_path", lambda: Path(__file__))
    elif request.param == "no compiler":
        monkeypatch.setattr(packages, "has_compiler", lambda: False)
    return request.param == "a library"


def test_16_bit_weights_stay_16_bit_in_eager_passes_where_the_library_is(has_library, tmp_path, monkeypatch):
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    save(config, tmp_path, factor=3.0)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    module.save_pretrained(tmp_path)
    monkeypatch.setattr("engine.execution.cpu.kernels.panel_linear.MIN_LARGE", 64 * 32)
    model, widened = backend_of(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    layers = [layer for layer in model.model.module.modules() if isinstance(layer, nn.Linear | PanelLinear)]
    assert {type(layer) for layer in layers} == {PanelLinear if has_library else nn.Linear}
    assert model.info.num_parameters == module.num_parameters()
    thinned, _ = model.beside(partial(first_layers, count=1), model.allocate_kv(2, 16))
    num_dropped = sum(parameter.numel() for parameter in module.model.layers[1].parameters())
    assert thinned.info.num_parameters == model.info.num_parameters - num_dropped
    text = list(range(2, 40))
    kv = model.allocate_kv(4, 16)
    assert model.run(build([ForwardRow(text[:20], 0, [1, 2, 3], 0)], kv)).logits.shape == (0, 64)
    logits = model.run(build([ForwardRow(text[20:], 20, [1, 2, 3], len(text) - 20)], kv)).logits
    expected = widened(torch.tensor([text])).logits[0, 20:]
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.long
@needs_compiler
def test_compiled_passes_read_new_weights_in_place(tmp_path):
    """Of packed layers, norms and all; nothing is compiled again. Kills: a package that keeps copies."""
    module = AutoModelForCausalLM.from_pretrained(save_llama(tmp_path, seed=3, hidden=64), dtype=torch.bfloat16)
    module.save_pretrained(tmp_path)
    backend, other = backend_of(tmp_path, compile="auto"), backend_of(tmp_path)
    learner = Learner(backend, 4)
    weights = learner._rounded(changed(learner.loaded, 0.3))
    backend.compile()
    compiled, package = backend._compiled, backend._package
    backend.assign(weights)
    other.assign(weights)
    kv, others = both_caches(backend)
    passes = build(mixed_rows()[1:4:2], kv), build(mixed_rows()[1:4:2], others)
    assert torch.allclose(backend.run(passes[0]).logits, other.run(passes[1]).logits, atol=1e-3)
    assert backend._compiled is compiled
    assert any(isinstance(layer, PanelLinear) for layer in backend._step.module.modules())
    assert packages.package_path(backend._step, *backend.model.configurations) == package
