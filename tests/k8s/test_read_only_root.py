"""The server runs as in the image: as user 1000, on a read-only root, with the mounts that a worker pod declares."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from engine.execution.cpu.compilation.packages import CACHE_VARIABLE
from tests.e2e.servers import free_port, wait_until_ok
from tests.k8s.dockerfile import command, stage, variables
from tests.k8s.manifests import K8S, ROOT, build, cluster_of, groups_of, needs_kustomize, of_kind
from tests.k8s.sandbox import USER, WITHOUT_NAMESPACES, has_namespaces, sandboxed, writable_mounts

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    needs_kustomize,
    pytest.mark.skipif(not has_namespaces(), reason=WITHOUT_NAMESPACES),
]

COMPILE_S = 300
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
COMPILES = """
import os, torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from triton import knobs
assert torch.compile(torch.cos)(torch.zeros(8)).sum() == 8
assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"]
assert knobs.cache.dir == os.environ["TRITON_CACHE_DIR"]
assert list(os.scandir(cache_dir()))
"""


def image(target: str) -> dict[str, str]:
    """What the image sets, and where this machine has its programs."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "PYTHONPATH": str(ROOT), **variables(stage(K8S / "Dockerfile", target))}


@pytest.fixture(scope="module")
def writable() -> dict[str, str]:
    (service,) = of_kind(build(K8S / "overlays" / "cpu"), "RayService")
    return writable_mounts(groups_of(cluster_of(service))["target"])


def test_a_worker_pod_writes_to_tmp_and_to_shared_memory(writable: dict[str, str]) -> None:
    assert writable == {"/tmp": "", "/dev/shm": "512M"}


@pytest.mark.parametrize("place", ["/", "/etc", "/var/tmp", str(ROOT), str(Path(sys.prefix).resolve())])
def test_the_root_of_the_sandbox_is_read_only_even_for_its_owner(place: str, writable: dict[str, str]) -> None:
    argv = sandboxed(["true"], writable, image("cpu"))
    argv[-1] = argv[-1].rpartition("\n")[0] + f"\ntouch /tmp/a; touch '{place}/a'"
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ran.stderr.endswith(f"{place.rstrip('/')}/a': Read-only file system\n")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_compilers_cache_where_the_image_says(target: str, writable: dict[str, str]) -> None:
    environment = image(target)
    assert [environment[name].partition("/tmp/")[0] for name in CACHES] == ["", ""]
    subprocess.run(sandboxed(["python", "-c", COMPILES], writable, environment), check=True, timeout=COMPILE_S)


@pytest.fixture(scope="module")
def server(writable: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    port = free_port()
    start = command(stage(K8S / "Dockerfile", "cpu"))
    log = tmp_path_factory.mktemp("sandbox") / "log"
    with log.open("w") as output:
        argv = sandboxed([*start, "--port", str(port)], writable, image("cpu"))
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ok(f"{url}/ready", process, log)
        yield url, psutil.Process(process.pid).children()[0]
    finally:
        # The first process of its namespace takes all others with it; unshare's death does not reach another user's.
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.wait()


def test_the_server_answers(server: tuple[str, psutil.Process]) -> None:
    url, process = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) as client:
        chunks = client.completions.create(model="paceline", prompt="Call me", max_tokens=24, seed=1, stream=True)
        assert len("".join(chunk.choices[0].text for chunk in chunks)) > 24
    assert process.uids().effective == USER


def test_passes_are_compiled(server: tuple[str, psutil.Process]) -> None:
    _, process = server
    cache = Path(f"/proc/{process.pid}/root{image('cpu')[CACHE_VARIABLE]}")
    deadline = time.monotonic() + COMPILE_S
    while not list(cache.rglob("*.pt2")):
        assert time.monotonic() < deadline, list(cache.rglob("*"))
        time.sleep(1)
