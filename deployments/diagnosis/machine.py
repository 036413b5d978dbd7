"""What this machine has: CPU, GPUs, memory, disks, compiler, Ray and the API's port."""

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import ray
from huggingface_hub.constants import HF_HUB_CACHE

from cluster.ray_core import CHECKED_RAY, this_machine
from deployments.config import AppConfig
from deployments.diagnosis.finding import Finding, judged
from engine.errors import ConfigError
from engine.execution.vllm.arguments import check_version

_CPUINFO = Path("/proc/cpuinfo")
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
_MIN_FREE_BYTES = 2 * 2**30
_MAX_DISK_USAGE = 0.95  # Ray stores nothing on a fuller disk


def machine_findings(config: AppConfig) -> Iterator[Finding]:
    """Check what takes a fraction of a second and no torch."""
    resources, memory = this_machine()[0], psutil.virtual_memory()
    yield _cpu(int(resources["CPU"]))
    advice = "end other programs: Ray alone takes 1 to 2 GiB" if memory.available < _MIN_FREE_BYTES else ""
    yield judged("memory", f"{size_text(memory.available)} of {size_text(memory.total)} free", advice)
    yield _disk("temporary files", Path("/tmp"))
    yield _disk("model cache", Path(HF_HUB_CACHE))
    if config.pair.compile == "auto" and not resources["GPU"]:
        compiler = os.environ.get("CXX", "g++")
        is_missing = shutil.which(compiler) is None
        yield judged("compiler", compiler, "there is none: install g++, or passes run uncompiled" * is_missing)
    is_checked = ray.__version__.startswith(f"{CHECKED_RAY}.")
    cluster = f", RAY_ADDRESS is {os.environ['RAY_ADDRESS']}" if "RAY_ADDRESS" in os.environ else ""
    yield judged("Ray", ray.__version__ + cluster, "" if is_checked else f"only {CHECKED_RAY} was tried: install that")
    if config.pair.execution == "vllm":
        try:
            yield Finding("ok", "vLLM", check_version())
        except ConfigError as error:
            yield Finding("error", "vLLM", str(error), "or set execution to torch")


def port_finding(port: int, host: str = "127.0.0.1") -> Finding:
    """Check that this machine has the API's address, and that its port is free."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        advice = f"choose another --port or --host, or check the server there: --url http://{host}:{port}"
        return judged("port", f"{host}:{port}: {error.strerror}", advice)
    return judged("port", f"{port} is free", "")


def gpu_finding() -> Finding:
    """Check that torch sees the GPUs that Ray sees."""
    import torch

    count, devices = int(this_machine()[0]["GPU"]), range(torch.cuda.device_count())
    if count and not devices:
        found = f"torch {torch.__version__} sees none of {count}"
        return Finding("error", "GPUs", found, "install a torch that is built for the driver's version of CUDA")
    properties = map(torch.cuda.get_device_properties, devices)
    return Finding(
        "ok", "GPUs", ", ".join(f"{gpu.name}, {size_text(gpu.total_memory)}" for gpu in properties) or "none"
    )


def size_text(num_bytes: float) -> str:
    """Return a number of bytes in GiB, or in MiB below 1 GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _cpu(num_cores: int) -> Finding:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    flags = next((line.split() for line in lines if line.lower().startswith(("flags", "features"))), [])
    features = [name for name in _FEATURES if name in flags]
    advice = "two cores are the least: draft and target take turns on one" if num_cores < 2 else ""
    if flags and not {"avx2", "asimd"} & set(features):
        advice = "passes will be slow: use a CPU with AVX2, or a GPU"
    return judged("CPU", f"{num_cores} cores, {' '.join(features) or 'no known vector instructions'}", advice)


def _disk(subject: str, folder: Path) -> Finding:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK):
        return Finding("error", subject, f"{there} cannot be written", "change its owner, or set HF_HOME or TMPDIR")
    usage = shutil.disk_usage(there)
    is_full = usage.used > _MAX_DISK_USAGE * usage.total or usage.free < _MIN_FREE_BYTES
    return judged(subject, f"{folder}: {size_text(usage.free)} free", "delete files on that disk" * is_full)
