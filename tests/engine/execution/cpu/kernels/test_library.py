"""The kernel library: built for the instructions that torch may use, and called by compiled passes by name."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from engine.execution.cpu.kernels import library as kernels
from engine.execution.cpu.kernels import paged_attention, panel_linear

SCHEMAS = [panel_linear.SCHEMA, paged_attention.SCHEMA]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_package_is_told_to_call_the_library(schema):
    ((operator, declarations),) = kernels.shims([schema]).items()
    assert operator.name() == "paceline::" + schema.partition("(")[0]
    assert f"aoti_torch_cpu_{schema.partition('(')[0]}(AtenTensorHandle " in declarations[0]
    assert declarations[0].endswith(", AtenTensorHandle* output)")


def test_a_declaration_has_the_c_types_of_the_operators_arguments():
    declaration = kernels._declaration("scale(Tensor x, int n, float factor) -> Tensor")
    assert "(AtenTensorHandle x, int64_t n, double factor, AtenTensorHandle* output)" in declaration


def test_an_operator_is_its_python_definition_until_the_library_is_loaded():
    kernels.define("doubled_for_a_test(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
    assert torch.ops.paceline.doubled_for_a_test(torch.ones(2)).tolist() == [2, 2]
    assert torch.ops.paceline.doubled_for_a_test(torch.ones(2, device="meta")).shape == (2,)


def test_a_library_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="nothing"):
        kernels.load(tmp_path / "nothing.so")


@pytest.mark.skipif(os.environ.get("ATEN_CPU_CAPABILITY") != "avx2", reason="any instructions may be used")
def test_with_avx2_only_the_library_has_no_wider_registers(library: Path):
    if (objdump := shutil.which("objdump")) is None:
        pytest.skip("there is no objdump")
    code = subprocess.run([objdump, "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    assert re.search(r"%ymm\d", code.stdout)
    assert not re.search(r"%zmm\d|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[1-7]\b", code.stdout)
