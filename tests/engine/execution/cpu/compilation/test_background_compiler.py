"""BackgroundCompiler: its process yields to all others, ends with its parent, and says how far it is."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.execution.cpu.compilation.background_compiler import BackgroundCompiler
from engine.execution.cpu.compilation.packages import CACHE_VARIABLE
from engine.models.registry import open_model


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """Replaces Python by a script, so that nothing is compiled."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))

    def replace(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


def compile_in_background(path, ready, *, dtype="float32", parts=(), **settings):
    return BackgroundCompiler(open_model(ModelConfig(str(path), **settings)), dtype, parts, ready, num_layers=2)


def wait_for(condition):
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"quantization": "int4"}, "--quantization int4 --until-input-ends"),
        ({"head": "head"}, "--quantization none --until-input-ends --head {}/head"),
        ({"head": "org/name"}, "--quantization none --until-input-ends --head org/name"),
    ],
)
def test_its_process_compiles_the_same_model_and_head_with_one_thread(
    settings, options, interpreter, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("head").mkdir()
    interpreter(f'echo "$@" $OMP_NUM_THREADS $TMPDIR > {tmp_path}/arguments')
    is_ready = threading.Event()
    compile_in_background("model", is_ready.set, dtype="bfloat16", **settings)
    assert is_ready.wait(30)
    *arguments, num_threads, folder = (tmp_path / "arguments").read_text().split()
    expected = f"-m engine.execution.cpu {tmp_path}/model --dtype bfloat16 {options.format(tmp_path)}"
    assert (" ".join(arguments), num_threads) == (expected, "1")
    assert not Path(folder).exists(), "what its compilers leave behind is removed"


def test_what_was_compiled_meanwhile_needs_no_process(interpreter, tmp_path):
    interpreter(f"touch {tmp_path}/started")
    (part := tmp_path / "head.pt2").touch()
    is_ready = threading.Event()
    compile_in_background(tmp_path, is_ready.set, parts=[part])
    assert is_ready.wait(30)
    assert not (tmp_path / "started").exists()


def test_decoding_comes_first_and_the_process_ends_no_sooner_than_this_one(interpreter, tmp_path):
    interpreter(f"cat; touch {tmp_path}/ended")
    is_ready = threading.Event()
    compiler = compile_in_background(tmp_path, is_ready.set)
    wait_for(lambda: compiler._process is not None)
    process = compiler._process
    wait_for(lambda: os.sched_getscheduler(process.pid) == os.SCHED_IDLE)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    assert os.getsid(process.pid) == os.getsid(0)
    assert os.getpgid(process.pid) == process.pid
    assert not is_ready.wait(0.2)
    process.stdin.close()
    assert is_ready.wait(30)
    assert (tmp_path / "ended").exists()
    assert compiler.progress is None


@pytest.mark.parametrize(("num_cores", "names"), [(1, "ab"), (2, "ab"), (2, "aa")])
def test_models_compile_at_once_where_there_are_several_cores_and_each_says_how_far_it_is(
    num_cores, names, interpreter, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    interpreter("cat")
    is_ready = threading.Semaphore(0)
    for name in {*names}:
        (tmp_path / name).mkdir()
    (tmp_path / "first.pt2").touch()
    parts = [tmp_path / "first.pt2", tmp_path / "second.pt2"]
    compilers = [compile_in_background(tmp_path / name, is_ready.release, parts=parts) for name in names]
    num_at_once = min(num_cores, len({*names}))
    wait_for(lambda: sum(compiler._process is not None for compiler in compilers) == num_at_once)
    for compiler in sorted(compilers, key=lambda compiler: compiler._process is None):
        if compiler._process is None:
            assert compiler.progress == (1, 2, compiler._expected_s), "it has not begun"
        wait_for(lambda one=compiler: one._process is not None)
        assert compiler.progress[:2] == (1, 2)
        compiler._process.stdin.close()
        assert is_ready.acquire(timeout=30)


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo first >&2; echo 'the last line' >&2; exit 1", "the last line"), ("exit 3", "exit status 3")],
)
def test_a_failed_compilation_is_logged_and_never_taken(script, reason, interpreter, tmp_path, caplog):
    interpreter(script)
    compiler = compile_in_background(tmp_path, pytest.fail)
    wait_for(lambda: compiler.progress is None)
    wait_for(lambda: f"serving eagerly, compiling failed: {reason}" in caplog.text)
