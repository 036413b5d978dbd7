"""The command that compiles models ahead of serving."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from engine.execution.cpu import __main__ as command
from engine.execution.cpu.backend import CpuBackend
from engine.execution.cpu.compiled import CompileError

ROOT = Path(__file__).parents[4]


def test_a_model_that_does_not_exist_ends_it_with_one_line(tmp_path):
    path = str(tmp_path / "nowhere")
    process = subprocess.run(
        [sys.executable, "-m", "engine.execution.cpu", path], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 1
    assert process.stderr.startswith(f"{path}: model directory {path} does not exist, ")
    assert process.stderr.count("\n") == 1
    assert process.stdout == ""


def test_an_error_is_its_last_line_although_its_input_goes_on(tmp_path):
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "engine.execution.cpu", str(tmp_path / "nowhere"), "--until-input-ends"]
    process = subprocess.run(command, cwd=ROOT, stdin=reading, capture_output=True, text=True, timeout=120)
    os.close(reading)
    os.close(writing)
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["compile", *arguments])
    command.main()


def test_every_model_is_compiled_in_the_number_format_that_it_is_served_in(target_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(CpuBackend, "compile", lambda backend: compiled.append((backend.info.name, backend.info.dtype)))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    call(monkeypatch, target_path, target_path)
    call(monkeypatch, target_path, "--dtype", "float16")
    assert compiled == [(target_path, "bfloat16")] * 2 + [(target_path, "float16")]


def test_a_model_is_compiled_with_the_weights_that_it_is_served_with(target_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(CpuBackend, "compile", lambda backend: compiled.append(backend._config.quantization))
    call(monkeypatch, target_path, "--quantization", "int4")
    call(monkeypatch, target_path)
    assert compiled == ["int4", "none"]


@pytest.mark.parametrize("error", [CompileError("there is no C++ compiler"), OSError("no space left")])
def test_a_model_that_cannot_be_compiled_is_named_with_the_reason(error, target_path, monkeypatch):
    def fail(backend):
        raise error

    monkeypatch.setattr(CpuBackend, "compile", fail)
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, target_path)
    assert end.value.code == f"{target_path}: {error}"


COMPILING_FOR_EVER = """
import subprocess, tempfile
from engine.execution.cpu import __main__ as command

def compile_for_ever(*_):
    with tempfile.TemporaryDirectory():
        subprocess.run(["sh", "-c", "echo > $TMPDIR/cc.s; echo $$; exec sleep 1000"])

command.load_cpu = compile_for_ever
command.main()
"""


def test_it_ends_with_its_compilers_and_files_when_its_input_ends(target_path, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILING_FOR_EVER, target_path, "--until-input-ends"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    compiler = psutil.Process(int(process.stdout.readline()))
    assert [*tmp_path.rglob("cc.s")]
    process.stdin.close()
    assert process.wait(30) == 1
    psutil.wait_procs([compiler], timeout=30)
    assert not compiler.is_running()
    assert [*tmp_path.iterdir()] == []
    process.stdout.close()
