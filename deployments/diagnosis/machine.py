"""What this machine has: CPU, GPUs, memory, disks, port, compiler and Ray. Nothing here imports torch but `gpus`."""

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import ray
from huggingface_hub.constants import HF_HUB_CACHE

from cluster.ray_core import CHECKED_RAY, this_machine
from deployments.config import AppConfig
from deployments.diagnosis.finding import Finding

_CPUINFO = Path("/proc/cpuinfo")
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
"""Instructions that passes on CPUs gain from."""
_MIN_FREE_BYTES = 2 * 2**30
_MAX_DISK_USAGE = 0.95
"""Ray stores no more objects on a disk that is fuller."""


def machine_findings(config: AppConfig) -> Iterator[Finding]:
    """Check what can be checked within a fraction of a second."""
    resources, _ = this_machine()
    yield _cpu(int(resources["CPU"]))
    free = psutil.virtual_memory().available
    few = free < _MIN_FREE_BYTES
    advice = "end other programs: Ray alone takes 1 to 2 GiB" if few else ""
    yield Finding(
        "warning" if few else "ok", "memory", f"{gib(free)} of {gib(psutil.virtual_memory().total)} free", advice
    )
    yield _disk("temporary files", Path("/tmp"))
    yield _disk("model cache", Path(HF_HUB_CACHE))
    if config.pair.compile == "auto" and not resources["GPU"]:
        yield _compiler()
    yield _ray()


def _cpu(num_cores: int) -> Finding:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    flags = next((line.split() for line in lines if line.lower().startswith(("flags", "features"))), [])
    features = [name for name in _FEATURES if name in flags]
    found = f"{num_cores} cores, {' '.join(features) or 'no known vector instructions'}"
    if flags and not {"avx2", "asimd"} & set(features):
        return Finding("warning", "CPU", found, "passes will be slow; use a CPU with AVX2, or a GPU")
    if num_cores < 2:
        return Finding("warning", "CPU", found, "draft and target take turns on one core; give this machine two")
    return Finding("ok", "CPU", found)


def _disk(subject: str, folder: Path) -> Finding:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(there)
    found = f"{folder}: {gib(usage.free)} free"
    if not os.access(there, os.W_OK):
        return Finding("error", subject, f"{folder} cannot be written", "change its owner, or set HF_HOME or TMPDIR")
    if usage.used > _MAX_DISK_USAGE * usage.total or usage.free < _MIN_FREE_BYTES:
        return Finding("warning", subject, found, "free space on this disk: models and Ray's files go there")
    return Finding("ok", subject, found)


def _compiler() -> Finding:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        return Finding("warning", "compiler", f"there is no {name}", "install g++: without it, passes run uncompiled")
    return Finding("ok", "compiler", name)


def _ray() -> Finding:
    found = f"version {ray.__version__}"
    if address := os.environ.get("RAY_ADDRESS"):
        found += f", RAY_ADDRESS is {address}; `paceline serve` starts a Ray of its own all the same"
    if ray.__version__.split(".")[:2] != CHECKED_RAY.split("."):
        return Finding("warning", "Ray", found, f"install version {CHECKED_RAY}: others were not tried")
    return Finding("ok", "Ray", found)


def port_finding(port: int) -> Finding:
    """Check that the API's port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            advice = f"choose another --port, or check the server there: --url http://127.0.0.1:{port}"
            return Finding("warning", "port", f"{port}: {error.strerror}", advice)
    return Finding("ok", "port", f"{port} is free")


def gpu_finding() -> Finding:
    """Check that torch sees the GPUs that Ray sees."""
    import torch

    number = int(this_machine()[0]["GPU"])
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if number and not names:
        build = f"torch {torch.__version__} sees none of {number} GPUs"
        return Finding("error", "GPUs", build, "install a torch that is built for the driver's CUDA version")
    memory = [gib(torch.cuda.get_device_properties(index).total_memory) for index in range(len(names))]
    return Finding("ok", "GPUs", ", ".join(map(" ".join, zip(names, memory, strict=True))) or "none")


def gib(num_bytes: float) -> str:
    """Return a number of bytes in GiB, or in MiB if it is less than one."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
