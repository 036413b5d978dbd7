import importlib.metadata
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from deployments.config import AppConfig
from deployments.diagnosis import machine
from deployments.diagnosis.machine import gpu_finding, machine_findings, port_finding


def levels(config: AppConfig | None = None) -> dict[str, str]:
    return {finding.subject: finding.level for finding in machine_findings(config or AppConfig())}


def test_every_subject_is_checked_once():
    subjects = ["CPU", "memory", "temporary files", "model cache", "compiler", "Ray"]
    assert list(levels()) == subjects
    assert list(levels(AppConfig.model_validate({"compile": "off"}))) == [s for s in subjects if s != "compiler"]


@pytest.mark.parametrize(("flags", "level"), [("fpu avx2", "ok"), ("fpu sse2", "warning")])
def test_a_cpu_without_wide_vectors_is_slow(monkeypatch, tmp_path: Path, flags, level):
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "this_machine", lambda: ({"CPU": 2.0, "GPU": 0.0}, {}))
    assert levels()["CPU"] == level


def test_what_is_scarce_is_a_warning(monkeypatch):
    usage, memory = namedtuple("usage", "total used free"), namedtuple("memory", "total available")
    monkeypatch.setattr(machine, "this_machine", lambda: ({"CPU": 1.0, "GPU": 0.0}, {}))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40 * 0.96, 2**40 * 0.04))
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory(2**33, 2**30))
    monkeypatch.setattr(machine, "CHECKED_RAY", "2.5")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert set(levels().values()) == {"warning"}


@pytest.mark.parametrize(("version", "level"), [("0.32.7", "ok"), ("0.33.0", "error"), (None, "error")])
def test_vllm_is_asked_for_where_it_computes(version, level, monkeypatch):
    versions = {} if version is None else {"vllm": version}

    def installed(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert levels(AppConfig.model_validate({"execution": "vllm"}))["vLLM"] == level


def test_a_port_is_free_or_taken():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        holder.listen()
        assert f"--url http://127.0.0.1:{port}" in port_finding(port).advice
    assert port_finding(port).level == "ok"


def test_gpus_that_torch_does_not_see_are_an_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gpu_finding().level == "ok"
    monkeypatch.setattr(machine, "this_machine", lambda: ({"CPU": 2.0, "GPU": 2.0}, {}))
    assert gpu_finding().level == "error"
