"""The command that compiles models ahead of serving."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine.execution.cpu import __main__ as command
from engine.execution.cpu.compilation.compiled_forward import CompileError
from engine.execution.cpu.cpu_backend import CpuBackend
from engine.heads.tapped import with_head
from engine.models.loader import load_model
from tests.engine.heads.tiny_heads import head_config, random_head

ROOT = Path(__file__).parents[4]


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["compile", *arguments])
    command.main()


def test_every_model_is_compiled_in_the_number_format_and_with_the_weights_that_it_is_served_in(
    target_path, monkeypatch
):
    compiled = []
    monkeypatch.setattr(
        CpuBackend, "compile", lambda one: compiled.append((one.info.dtype, one._source.config.quantization))
    )
    call(monkeypatch, target_path, target_path)
    call(monkeypatch, target_path, "--dtype", "float16", "--quantization", "int4")
    assert compiled == [("float32", "none")] * 2 + [("float16", "int4")]


def test_a_head_is_compiled_beside_its_target(target_path, monkeypatch):
    compiled = []

    def load(source):
        assert source.config.head == "a head"
        model = load_model(source)
        return with_head(model, random_head(model, head_config()))

    monkeypatch.setattr(command, "load_target", load)
    monkeypatch.setattr(CpuBackend, "compile", lambda one: compiled.append(type(one.model.module).__name__))
    call(monkeypatch, target_path, "--head", "a head")
    assert compiled == ["TappedLM", "Eagle3Head"]


@pytest.mark.parametrize("error", [CompileError("there is no C++ compiler"), OSError("no space left")])
def test_a_model_that_cannot_be_compiled_is_named_with_the_reason(error, target_path, monkeypatch):
    def fail(backend):
        raise error

    monkeypatch.setattr(CpuBackend, "compile", fail)
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, target_path)
    assert end.value.code == f"{target_path}: {error}"


COMPILING_FOR_EVER = """
import subprocess
from engine.execution.cpu import __main__ as command

command.load_target = lambda *_, **__: subprocess.run(["sh", "-c", "echo $$; exec sleep 1000"])
command.main()
"""


def test_it_ends_with_its_compilers_when_its_input_ends(target_path):
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILING_FOR_EVER, target_path, "--until-input-ends"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    compiler = psutil.Process(int(process.stdout.readline()))
    process.stdin.close()
    process.wait(30)
    psutil.wait_procs([compiler], timeout=30)
    assert not compiler.is_running()
    process.stdout.close()
