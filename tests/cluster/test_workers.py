"""What a worker tells whoever started the application."""

import subprocess
import sys

from tests.cluster.models import save_llama

LOAD = """
import sys
from cluster.workers import show_progress
from engine.config import ModelConfig
from engine.model import CausalLM
show_progress()
CausalLM.load(ModelConfig(sys.argv[1], dtype="float32", device="cpu"))
"""


def test_a_worker_says_what_it_loaded_and_how_long_that_took(tmp_path):
    path = str(save_llama(tmp_path / "model", seed=0))
    process = subprocess.run([sys.executable, "-c", LOAD, path], capture_output=True, text=True, check=True)
    [line] = process.stderr.splitlines()
    assert line.startswith("INFO ")
    assert f"{path}: 0.0 M parameters in float32 on cpu, loaded in " in line
