"""Compiled passes: the same logits and caches as the eager ones, whole and in pieces."""

import os
import threading

import pytest
import torch
from transformers import MistralConfig

from engine.config import ModelConfig
from engine.execution.batch import ForwardRow, build
from engine.execution.cpu import packages as compilation
from engine.execution.cpu.compiled import (
    PIECE_LENGTH,
    CompiledForward,
    CompileError,
    _removing_temporary_files,
    can_run,
    example,
    load_noise,
    pieces,
    samples,
)
from engine.execution.registry import load_backend
from tests.engine.execution.cpu.batches import assert_same_caches, both_caches, mixed_rows
from tests.engine.tiny import SIZES, save

# torch's exporter warns of parts of itself.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")]
needs_compiler = pytest.mark.skipif(not compilation.has_compiler(), reason="there is no C++ compiler")


def load(path):
    return load_backend(ModelConfig(path, dtype="float32", device="cpu"))


@pytest.mark.parametrize("window", [None, 24])
def test_pieces_compute_what_the_whole_batch_does(window, tmp_path):
    save(MistralConfig(**SIZES, sliding_window=window), tmp_path)
    backend = load(str(tmp_path))
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


@pytest.mark.slow
@needs_compiler
def test_a_loaded_package_leaves_no_temporary_files(tmp_path, monkeypatch):
    """A worker that is killed cannot remove them."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    compilation.compile_once(compilation.noise_path(), compilation.compile_noise)
    load_noise(compilation.noise_path())
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")] == []
    assert os.environ["TMPDIR"] == str(tmp_path)


def test_packages_that_are_opened_at_once_leave_the_folder_of_temporary_files_as_it_was(tmp_path, monkeypatch):
    """Opening one changes it for the whole process: with two at once, one would leave that of the other."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    is_open, may_close, folders = threading.Event(), threading.Event(), []

    def open_first():
        with _removing_temporary_files():
            is_open.set()
            assert may_close.wait(30)

    def open_second():
        with _removing_temporary_files():
            folders.append(os.environ["TMPDIR"])

    threads = [threading.Thread(target=target, daemon=True) for target in (open_first, open_second)]
    threads[0].start()
    assert is_open.wait(30)
    threads[1].start()
    threads[1].join(0.1)
    assert not folders
    may_close.set()
    for thread in threads:
        thread.join(30)
    assert len(folders) == 1
    assert os.environ["TMPDIR"] == str(tmp_path)


@pytest.mark.slow
@needs_compiler
def test_prompts_run_compiled_however_many_threads_there_are(windowed_path, monkeypatch):
    backend = load(windowed_path)
    backend.compile()
    kv, others = both_caches(backend)
    with torch.inference_mode():
        expected = backend.logits(build(mixed_rows(), others))
    monkeypatch.setattr(backend, "logits", lambda batch: pytest.fail("it ran eagerly"))
    for count in (2, 1):
        torch.set_num_threads(count)
        assert (backend.run(build(mixed_rows(), kv)).logits - expected).abs().max() < 1e-4
        assert_same_caches(kv, others)


@pytest.mark.slow
@needs_compiler
def test_windows_compile(windowed_path):
    backend = load(windowed_path)
    backend.compile()  # compares with the eager pass itself
    kv, others = backend.allocate_kv(16, 16), backend.allocate_kv(16, 16)
    rows = [ForwardRow(list(range(2, 2 + n)), 20 + n, [2 * n, 2 * n + 1, 15], n) for n in (1, 2, 5)]
    for cache, other in zip((*kv.keys, *kv.values), (*others.keys, *others.values), strict=True):
        other.copy_(cache.normal_())
    with torch.inference_mode():
        found, expected = backend.run(build(rows, kv)).logits, backend.logits(build(rows, others))
    assert (found - expected).abs().max() < 1e-4
    for cache, other in zip((*kv.keys, *kv.values), (*others.keys, *others.values), strict=True):
        assert torch.allclose(cache, other, atol=1e-5)  # what was written counts as much as what was returned


@pytest.mark.slow
@needs_compiler
def test_other_weights_use_the_same_package_and_a_pass_of_other_weights_is_refused(
    windowed_path, save_windowed, tmp_path
):
    backend = load(windowed_path)
    backend.compile()
    path = backend._package
    before = path.stat().st_mtime_ns
    other = load(save_windowed(tmp_path / "other", seed=9))
    other.compile()
    assert path.stat().st_mtime_ns == before
    candidate = CompiledForward(path, other._step)
    batch = build(samples()[0], other.allocate_kv(16, 16))
    with torch.inference_mode(), pytest.raises(CompileError, match="differs from the eager one"):
        candidate.check(batch, backend.logits(batch))


def test_one_pass_computes_short_rows_only(target):
    kv = target.allocate_kv(16, 16)
    assert can_run(example(kv)[0])
    assert can_run(build([ForwardRow([3] * 20, 0, [1, 2], 1)], kv))
    assert can_run(build([ForwardRow([3] * PIECE_LENGTH, 16, list(range(1, 10)), 1)], kv))
    assert not can_run(build([ForwardRow([3] * (PIECE_LENGTH + 1), 16, list(range(1, 11)), 1)], kv))
    assert not can_run(build([ForwardRow([3], 5, [1], 1), ForwardRow([3] * 20, 0, [1, 2], 1)], kv))
