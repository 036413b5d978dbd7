"""The kernels as compiled for A100, H100 and B200: registers, shared memory and instructions against `cubins.json`.

Fewer registers or less memory than in the file is progress: write the file anew (see `cubins`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

TABLE = json.loads(Path(__file__).with_name("cubins.json").read_text())
SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}


def compiled(*arguments):
    """The resources of the kernels, by a process that does not interpret them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.execution.cuda.kernels.cubins", *arguments]
    finished = subprocess.run(command, env=environment, cwd=Path(__file__).parents[5], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-2000:]
    return json.loads(finished.stdout)


def check(found):
    for kernel, limits in found.items():
        known = TABLE[kernel]
        assert limits["k"] == known["k"], kernel
        for resource in ("registers", "local", "shared"):
            assert limits[resource] <= known[resource], f"{kernel}: {resource}"


@pytest.mark.slow
def test_a_few_kernels_take_no_more_than_they_did():
    check(compiled())


@pytest.mark.long
def test_no_kernel_takes_more_than_it_did():
    found = compiled("--all")
    assert found.keys() == TABLE.keys()
    check(found)


def test_every_kernel_fits_into_shared_memory():
    for kernel, resources in TABLE.items():
        assert resources["shared"] <= SHARED_BYTES[kernel.split()[0]], kernel


def test_no_kernel_of_an_h100_spills_and_no_product_does():
    """Not mended: attention on an A100, and on a B200 to fp8 caches with heads of 64."""
    spilling = {kernel for kernel, resources in TABLE.items() if resources["local"] > 8}
    assert all(kernel.startswith(("sm_80 attention", "sm_100 attention 1B fp8")) for kernel in spilling), spilling


def test_all_tiles_of_products_and_attention_sum_with_instructions_of_one_length():
    """Sums of 16 products an instruction: tiles whose instructions differ would round differently."""
    assert all(
        resources["k"] == ([16] if "merge" not in kernel and "write" not in kernel else [])
        for kernel, resources in TABLE.items()
    )
