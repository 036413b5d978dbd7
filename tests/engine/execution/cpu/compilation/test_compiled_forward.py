"""Compiled passes: the same logits and caches as the eager ones, whole and in pieces, traced and compiled."""

import os

import pytest
import torch
from transformers import MistralConfig

from engine.execution.batch import ForwardRow, build
from engine.execution.cpu.compilation import packages as compilation
from engine.execution.cpu.compilation.compiled_forward import (
    PIECE_LENGTH,
    CompiledForward,
    CompileError,
    TracedContext,
    arguments,
    can_run,
    example,
    load_noise,
    pieces,
    samples,
)
from engine.execution.cpu.kernels.paged_attention import suits
from engine.execution.kv_tensors import KVTensors
from engine.heads.head import head_model
from engine.models.layers.layer_attention import AttentionParams, KVShape
from tests.engine.execution.cpu.batches import assert_same_caches, both_caches, mixed_rows
from tests.engine.heads.tiny_heads import backend_with_head, head_config
from tests.engine.tiny import SIZES, backend_of, save

# torch's exporter warns of parts of itself.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")]
needs_compiler = pytest.mark.skipif(not compilation.has_compiler(), reason="there is no C++ compiler")


KV_HEADS, BLOCK = 2, 4
ROWS = {
    "single tokens": [ForwardRow([1], 9, [1, 2, 3], 1), ForwardRow([2], 0, [4], 1)],
    "rows of several lengths": [ForwardRow([1] * 5, 3, [1, 2], 5), ForwardRow([1] * 2, 6, [3, 4], 2)],
    "a tree and a chain": [
        ForwardRow([1] * 5, 6, [1, 2, 3], 5, parents=[-1, -1, 0, 1]),
        ForwardRow([1] * 3, 2, [4, 5], 3),
    ],
    "part of a prompt": [ForwardRow([1] * 20, 7, [1, 2, 3, 4, 5, 6, 7], 20)],
}


def traced(batch):
    """Return a batch's context with the tensors that the compiled step makes of it."""
    return TracedContext(batch.paged.kv, batch.paged.groups)


def caches(head_dim):
    """Two caches of two layers with the same random entries."""
    generator = torch.Generator().manual_seed(0)
    one, other = (KVTensors(KVShape(2, KV_HEADS, head_dim, head_dim), 10, BLOCK, torch.empty(0)) for _ in range(2))
    for cache, copied in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        copied.copy_(cache.normal_(generator=generator))
    return one, other


@pytest.mark.parametrize("head_dim", [8, 16], ids=["small heads", "heads that the C++ computes"])
@pytest.mark.parametrize("name", ROWS)
def test_the_traced_context_attends_and_writes_as_the_eager_context_does(name, head_dim):
    assert suits(head_dim, torch.float32) == (head_dim == 16)
    kv, others = caches(head_dim)
    batch, same = build(ROWS[name], kv), build(ROWS[name], others)
    windows = [None, 3] if batch.paged.groups[0].extra is None else [None, 9]
    context = traced(same)
    generator = torch.Generator().manual_seed(1)
    sinks = torch.randn(6, generator=generator)
    for layer, params in (
        (0, AttentionParams()),
        (1, AttentionParams(windows[1], 0.5)),
        (0, AttentionParams(windows[1])),
        (1, AttentionParams(windows[1], softcap=2.0)),
        (0, AttentionParams(scaling=0.3, sinks=sinks)),
        (1, AttentionParams(first=1)),
        (0, AttentionParams(sees_row=True)),
    ):
        query, key, value = (
            torch.randn(count, len(batch.token_ids), head_dim, generator=generator) for count in (6, KV_HEADS, KV_HEADS)
        )
        expected = batch.paged.attend(layer, query, key, value, params)
        found = context.attend(layer, query, key, value, params)
        assert found.shape == expected.shape
        wanted = batch.logit_indices  # nobody reads what is computed for padding
        assert torch.allclose(found[wanted], expected[wanted], atol=1e-5)
    for cache, copied in zip((*kv.keys, *kv.values), (*others.keys, *others.values), strict=True):
        assert torch.equal(cache[1:], copied[1:])


class TracedStep:
    """Stands in for a loaded package: computes what would be compiled."""

    def __init__(self, step):
        self._run = lambda tensors: step(*tensors[:10], *self.caches)
        self.call = CompiledForward.__call__

    def __call__(self, batch, draws=None):
        self.caches = arguments(batch)[1:]
        return self.call(self, batch, draws)


@pytest.mark.parametrize("of_target", [True, False], ids=["a target with a head", "the head"])
@torch.inference_mode()
def test_what_a_pass_writes_for_a_head_is_checked(of_target, target_path):
    backend = backend_with_head(target_path, head_config(layers=2, draft_vocab=20))
    one = backend if of_target else backend.beside(head_model, backend.allocate_kv(2, 16))[0]
    kv, eager_kv = one.allocate_kv(16, 16), one.allocate_kv(16, 16)
    kv.states.copy_(eager_kv.states.normal_())
    traced_step = TracedStep(one._step)
    for rows in samples():
        expected = one.logits(build(rows, eager_kv))
        CompiledForward.check(traced_step, build(rows, kv), expected, eager_kv)
    for cache in eager_kv.added:
        cache[0, 1, 4, 0, 0] += 1.0
        with pytest.raises(CompileError, match="differs from the eager one"):
            CompiledForward.check(traced_step, build(rows, kv), expected, eager_kv)
        cache[0, 1, 4, 0, 0] -= 1.0


@pytest.mark.parametrize("window", [None, 24])
def test_pieces_compute_what_the_whole_batch_does(window, tmp_path):
    save(MistralConfig(**SIZES, sliding_window=window), tmp_path)
    backend = backend_of(str(tmp_path))
    kv, others = both_caches(backend)
    batch = build(mixed_rows(), kv)
    with torch.inference_mode():
        expected = backend.logits(build(mixed_rows(), others))
        found = torch.full_like(expected, float("nan"))
        lengths = []
        for piece, where in pieces(batch):
            found[where] = backend.logits(piece)
            lengths.append(len(piece.token_ids))
    assert max(lengths) == PIECE_LENGTH
    assert sum(lengths) == len(batch.token_ids)
    assert (found - expected).abs().max() < 1e-4
    assert_same_caches(kv, others)


@pytest.mark.long
@needs_compiler
def test_a_loaded_package_leaves_no_temporary_files(tmp_path, monkeypatch):
    """A worker that is killed cannot remove them."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    compilation.compile_once(compilation.noise_path(), compilation.compile_noise)
    load_noise(compilation.noise_path())
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")] == []
    assert os.environ["TMPDIR"] == str(tmp_path)


def test_one_pass_computes_short_rows_only(target):
    kv = target.allocate_kv(16, 16)
    assert can_run(example(kv)[0])
    assert can_run(build([ForwardRow([3] * 20, 0, [1, 2], 1)], kv))
    assert can_run(build([ForwardRow([3] * PIECE_LENGTH, 16, list(range(1, 10)), 1)], kv))
    assert not can_run(build([ForwardRow([3] * (PIECE_LENGTH + 1), 16, list(range(1, 11)), 1)], kv))
    assert not can_run(build([ForwardRow([3], 5, [1], 1), ForwardRow([3] * 20, 0, [1, 2], 1)], kv))
