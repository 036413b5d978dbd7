"""The command that compiles models ahead of serving."""

import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("error", [CompileError("there is no C++ compiler"), OSError("no space left")])
def test_a_model_that_cannot_be_compiled_is_named_with_the_reason(error, target_path, monkeypatch):
    def fail(backend):
        raise error

    monkeypatch.setattr(CpuBackend, "compile", fail)
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, target_path)
    assert end.value.code == f"{target_path}: {error}"
