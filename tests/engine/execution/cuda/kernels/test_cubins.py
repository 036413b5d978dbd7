"""The kernels as compiled for five kinds of GPUs: registers, shared memory and instructions against `cubins.json`.

Fewer registers or less memory than in the file is progress: write the file anew (see `cubins`).
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from engine.models.causal_lm import CausalLM, kv_shape
from tests.families import listed

pytest.importorskip("triton", reason="the kernels need triton")
import triton

from engine.execution.cuda.kernels import triton_attention as attention
from tests.engine.execution.cuda.kernels.cubins import SHARED_BYTES, SIZES


def read(text):
    """The resources of each kernel on each GPU."""
    table = json.loads(text)
    return {f"{gpu} {kernel}": one for kernel, of_gpus in table.items() for gpu, one in of_gpus.items()}


TABLE = read(Path(__file__).with_name("cubins.json").read_text())
FAMILIES = listed()[1]
of_this_version = pytest.mark.skipif(triton.__version__ != "3.7.1", reason="the figures are of triton 3.7.1")


@of_this_version
@pytest.mark.long
def test_no_kernel_takes_more_than_it_did():
    """Compiled by a process that does not interpret them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.execution.cuda.kernels.cubins"]
    finished = subprocess.run(command, env=environment, cwd=Path(__file__).parents[5], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-2000:]
    found = read(finished.stdout)
    assert found.keys() == TABLE.keys()
    for kernel, limits in found.items():
        assert limits["k"] == TABLE[kernel]["k"], kernel
        for resource in ("registers", "local", "shared"):
            assert limits[resource] <= TABLE[kernel][resource], f"{kernel}: {resource}"


def test_every_kernel_fits_into_shared_memory():
    for kernel, resources in TABLE.items():
        assert resources["shared"] <= SHARED_BYTES[int(kernel.split()[0][3:])], kernel


@pytest.mark.parametrize("name", FAMILIES)
def test_the_heads_of_every_served_family_are_compiled_for_every_gpu(name):
    """In tables by the size that keys are padded to; a family's layers without our kernel are attended to by torch."""
    config = CONFIG_MAPPING[name]()
    shape = kv_shape(config, 1)
    if CausalLM.why_eager(config) is not None or not shape.value_dim or shape.key_dim > attention.MAX_DIM:
        return
    padded = triton.next_power_of_2(max(shape.key_dim, shape.value_dim))
    sizes = [size for size in SIZES if triton.next_power_of_2(size[-1]) == padded]
    assert sizes, shape
    for (heads, kv_heads, dim), gpu in itertools.product(sizes, SHARED_BYTES):
        assert f"sm_{gpu} attention {heads}/{kv_heads} x {dim} bf16 length 512" in TABLE


def test_no_kernel_of_an_h100_spills_much_and_no_product_does():
    """Not mended: attention on others, an H100's to fp8 caches (72 bytes), a B200's product of 16 rows with experts."""
    spilling = {kernel for kernel, resources in TABLE.items() if resources["local"] > 24}
    spilling = {one for one in spilling if "attention" not in one or one.startswith("sm_90")}
    assert spilling == {"sm_90 attention 8B fp8 length 1", "sm_100 product of experts bf16 16"}


def test_all_tiles_of_products_and_attention_sum_with_instructions_of_one_length():
    """Sums of 16 products an instruction: tiles whose instructions differ would round differently."""
    assert all(
        resources["k"] == [16]
        for kernel, resources in TABLE.items()
        if "product" in kernel or ("attention" in kernel and "fp32" not in kernel)
    )
