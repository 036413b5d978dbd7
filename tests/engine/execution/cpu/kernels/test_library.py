"""The kernel library: built for the instructions that torch may use, and called by compiled passes by name."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.skipif(os.environ.get("ATEN_CPU_CAPABILITY") != "avx2", reason="any instructions may be used")
def test_with_avx2_only_the_library_has_no_wider_registers(library: Path):
    if (objdump := shutil.which("objdump")) is None:
        pytest.skip("there is no objdump")
    code = subprocess.run([objdump, "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    assert re.search(r"%ymm\d", code.stdout)
    assert not re.search(r"%zmm\d|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[1-7]\b", code.stdout)
