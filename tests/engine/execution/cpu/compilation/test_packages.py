"""Packages: what they depend on, where they are kept, and what cannot become one."""

import re
import shutil
import threading
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from engine.execution.cpu.compilation import packages
from engine.execution.cpu.compilation.compiled_forward import CompileError, Step
from tests.engine.heads.tiny_heads import head_config
from tests.engine.tiny import model_of

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not packages.has_compiler(), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def model(target_path):
    return model_of(target_path)


@pytest.fixture(scope="module")
def step(model):
    return Step(model.module)


def paths(step, config):
    return [packages.package_path(step, config), packages.noise_path(), packages.kernels_path()]


def test_a_package_belongs_to_shapes_and_configurations_whatever_the_weights_and_wherever_they_lie(
    model, step, target_path
):
    """Some of a head's settings change no weight."""
    again, half, longer = model_of(target_path), model_of(target_path, dtype="bfloat16"), deepcopy(model.config)
    again.module.lm_head.weight.neg_()
    again.config._name_or_path = "elsewhere"
    longer.rope_theta = 5e5
    first = packages.package_path(step, model.config)
    assert packages.package_path(Step(again.module), again.config) == first
    others = [packages.package_path(Step(half.module), half.config), packages.package_path(step, longer)]
    for changed in ({}, {"norm_before_residual": True}, {"taps": (1, 2, 1)}, {"layers": 2}):
        others.append(packages.package_path(step, model.config, head_config(**changed)))
    assert len({first, *others}) == 7


@pytest.mark.parametrize(
    "name",
    ["execution/cpu/kernels/panel_linear.cpp", "heads/eagle3.py", "models/causal_lm.py", "sampling/noise.py"],
)
def test_everything_is_compiled_again_after_a_change_of_its_sources(name, model, step, tmp_path, monkeypatch):
    before = paths(step, model.config)
    engine = shutil.copytree(packages._ENGINE, tmp_path / "engine", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr(packages, "_ENGINE", engine)
    assert paths(step, model.config) == before
    with (engine / name).open("a") as file:
        file.write("changed")
    assert not set(before) & {*paths(step, model.config)}


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch, "__version__", "99.0"),
        (packages.transformers, "__version__", "99.0"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"),
        (Path, "read_text", lambda path, read=Path.read_text: "flags : x" if path.name == "cpuinfo" else read(path)),
    ],
    ids=["torch", "transformers", "instructions", "flags"],
)
def test_another_library_or_cpu_has_other_packages(owner, name, value, model, step, monkeypatch):
    before = paths(step, model.config)
    monkeypatch.setattr(owner, name, value)
    assert not {*before} & {*paths(step, model.config)}


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


def test_a_machine_without_a_cpp_compiler_is_known(monkeypatch):
    def fail():
        raise torch._inductor.exc.InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", fail)
    assert not packages.has_compiler()
    with pytest.raises(CompileError, match=re.escape("there is no C++ compiler")):
        packages.load_kernels()


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
    path.with_suffix(".lock").unlink()
    path.with_suffix(".lock").mkdir()  # what is there needs no right to write, but root may write everywhere
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
