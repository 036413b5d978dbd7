"""Packages: what they depend on, where they are kept, who makes them, and what cannot become one."""

import os
import re
import sys
import threading
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from engine.execution import attention, dot_product
from engine.execution.cpu import compiled, half_weights, kernels, packages, paged_attention, quantized_weights, traced
from engine.execution.cpu.compiled import CompileError, Step
from engine.models import causal_lm, fusion, quantized_linear, sub_layers
from engine.models.loader import load_model
from engine.sampling import noise

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not packages.has_compiler(), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def model(target_path):
    return load_model(ModelConfig(target_path), device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def step(model):
    return Step(model.module, [None])


def test_a_package_belongs_to_weights_of_any_value_but_of_these_shapes(model, step, target_path):
    path = packages.package_path(step, model.config)
    again = load_model(ModelConfig(target_path), device=CPU, dtype=torch.float32)
    again.module.lm_head.weight.neg_()
    assert packages.package_path(Step(again.module, [None]), again.config) == path
    half = load_model(ModelConfig(target_path), device=CPU, dtype=torch.bfloat16)
    assert packages.package_path(Step(half.module, [None]), half.config) != path


def test_a_package_belongs_to_a_configuration_wherever_it_lies(model, step):
    path = packages.package_path(step, model.config)
    elsewhere, longer = deepcopy(model.config), deepcopy(model.config)
    elsewhere._name_or_path = "elsewhere"
    longer.rope_theta = 5e5
    assert packages.package_path(step, elsewhere) == path
    assert packages.package_path(step, longer) != path


PATHS = {
    "package": lambda step, model: packages.package_path(step, model.config),
    "noise": lambda *_: packages.noise_path(),
    "kernels": lambda *_: packages.kernels_path(),
}


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (attention, ["package"]),
        (causal_lm, ["package"]),
        (compiled, ["package", "noise"]),
        (dot_product, ["package"]),
        (fusion, ["package"]),
        (half_weights, ["package"]),
        (kernels, ["package", "kernels"]),
        (noise, ["package", "noise"]),
        (packages, ["package", "noise", "kernels"]),
        (paged_attention, ["package"]),
        (quantized_linear, ["package"]),
        (quantized_weights, ["package"]),
        (sub_layers, ["package"]),
        (traced, ["package"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_changed_source_is_compiled_again(module, names, model, step, tmp_path, monkeypatch):
    before = {name: path_of(step, model) for name, path_of in PATHS.items()}
    changed = tmp_path / "changed.py"
    changed.write_text(Path(module.__file__).read_text() + "# changed")
    monkeypatch.setattr(module, "__file__", str(changed))
    assert [name for name, path_of in PATHS.items() if path_of(step, model) != before[name]] == names


def test_changed_cpp_is_built_again(tmp_path, monkeypatch):
    before = packages.kernels_path()
    assert before.suffix == ".so"
    changed = tmp_path / kernels.SOURCES[0].name
    changed.write_text(kernels.SOURCES[0].read_text() + "// changed")
    monkeypatch.setattr(kernels, "SOURCES", [changed, *kernels.SOURCES[1:]])
    assert packages.kernels_path() != before


def change_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "99.0")


def change_transformers(monkeypatch):
    monkeypatch.setattr(packages.transformers, "__version__", "99.0")


def change_instructions(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")


def change_flags(monkeypatch):
    real = Path.read_text
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *args: "flags : another CPU" if path == Path("/proc/cpuinfo") else real(path, *args),
    )


@pytest.mark.parametrize("change", [change_torch, change_transformers, change_instructions, change_flags])
def test_another_library_or_cpu_has_other_packages(change, model, step, monkeypatch):
    before = [path_of(step, model) for path_of in PATHS.values()]
    change(monkeypatch)
    assert all(path_of(step, model) != path for path_of, path in zip(PATHS.values(), before, strict=True))


def test_the_cache_folder_is_the_configured_one_or_the_users(tmp_path, monkeypatch):
    def folder(**variables):
        for name in (packages.CACHE_VARIABLE, "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return packages.noise_path().parent

    monkeypatch.setenv("HOME", "/home/someone")
    assert folder() == Path("/home/someone/.cache/paceline")
    assert folder(XDG_CACHE_HOME="/caches") == Path("/caches/paceline")
    assert folder(PACELINE_CACHE_DIR="/here", XDG_CACHE_HOME="/caches") == Path("/here")
    assert folder(PACELINE_CACHE_DIR="~/there") == Path("/home/someone/there")


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """Replaces Python by a script, so that nothing is compiled."""

    def replace(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


def test_a_process_of_its_own_compiles_the_same_model_with_one_thread(interpreter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    interpreter(f'echo "$@" $OMP_NUM_THREADS > {tmp_path}/arguments')
    is_ready = threading.Event()
    packages.Compiling(ModelConfig("model", quantization="int4"), "bfloat16", is_ready.set)
    assert is_ready.wait(30)
    arguments = (tmp_path / "arguments").read_text().split()
    options = ["--dtype", "bfloat16", "--quantization", "int4", "--until-input-ends"]
    assert arguments == ["-m", "engine.execution.cpu", f"{tmp_path}/model", *options, "1"]


def test_its_input_ends_no_sooner_than_this_process(interpreter, tmp_path):
    interpreter(f"cat; touch {tmp_path}/ended")
    is_ready = threading.Event()
    compiling = packages.Compiling(ModelConfig(str(tmp_path)), "float32", is_ready.set)
    assert not is_ready.wait(0.2)
    assert compiling._process.poll() is None
    held_open, compiling._held_open = compiling._held_open, os.dup(0)
    os.close(held_open)
    assert is_ready.wait(30)
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo first >&2; echo 'the last line' >&2; exit 1", "the last line"), ("exit 3", "exit status 3")],
)
def test_a_failed_compilation_is_logged_and_never_taken(script, reason, interpreter, tmp_path, caplog):
    interpreter(script)
    packages.Compiling(ModelConfig(str(tmp_path)), "float32", pytest.fail)
    for thread in threading.enumerate():
        if thread.name == "compiling":
            thread.join(30)
    assert f"Serving eagerly, compiling failed: {reason}" in caplog.text


def test_a_machine_without_a_cpp_compiler_is_known(monkeypatch):
    def fail():
        raise torch._inductor.exc.InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", fail)
    assert not packages.has_compiler()
    with pytest.raises(CompileError, match=re.escape("there is no C++ compiler")):
        packages.load_kernels()


def test_a_compiler_that_fails_is_a_compile_error_of_one_line(tmp_path, monkeypatch):
    def fail(path):
        raise ValueError("first\nsecond")

    monkeypatch.setattr(kernels, "build", fail)
    with pytest.raises(CompileError, match=r"^ValueError: first$"):
        packages.compile_kernels(tmp_path / "kernels.so")


def test_what_is_missing_is_compiled_once_by_whoever_comes_first(tmp_path):
    path = tmp_path / "folder" / "package.pt2"
    calls = []

    def compile_to(target):
        calls.append(target)
        target.touch()

    threads = [threading.Thread(target=packages.compile_once, args=(path, compile_to)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    packages.compile_once(path, compile_to)
    assert calls == [path]


class Fixed(torch.nn.Module):
    """Has a size taken for a number while it is traced."""

    def forward(self, x):
        return x.new_ones(len(x)) + x


@needs_compiler
def test_a_size_that_tracing_fixed_is_found(tmp_path):
    with pytest.raises(packages.CompileError, match="dimension 0 of x is not symbolic"):
        packages._compile(Fixed(), (torch.ones(5),), ({0: torch.export.Dim.AUTO},), tmp_path / "package.pt2")


def test_what_is_in_the_cache_needs_no_right_to_write_there(tmp_path):
    path = tmp_path / "package.pt2"
    path.touch()
    path.with_suffix(".lock").mkdir()  # root may write everywhere
    packages.compile_once(path, pytest.fail)
