"""The kernels as compiled for five kinds of GPUs: their shared memory, and the order of their sums."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")
from tests.engine.execution.cuda.kernels.cubins import SHARED_BYTES


@pytest.mark.long
def test_every_kernel_fits_into_every_gpu_and_all_tiles_sum_with_instructions_of_one_length():
    """Compiled by a process that does not interpret them. Tiles whose instructions differ would round differently."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.execution.cuda.kernels.cubins"]
    finished = subprocess.run(command, env=environment, cwd=Path(__file__).parents[5], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-2000:]
    for gpu, kernels in json.loads(finished.stdout).items():
        for name, kernel in kernels.items():
            assert kernel["shared"] <= SHARED_BYTES[int(gpu)], f"{name} on sm_{gpu}"
            is_sum = "product" in name or (name.startswith("attention") and "fp32" not in name)
            assert kernel["k"] == [16] * is_sum or "fp32" in name, f"{name} on sm_{gpu}"
