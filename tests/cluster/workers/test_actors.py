"""What a worker tells whoever started the application."""

import gc
import json
import subprocess
import sys

import pytest

from cluster.workers.actors import _importing
from tests.cluster.models import save_llama

LOAD = """
import sys
from cluster.workers.actors import show_progress
from engine.config import ModelConfig
from engine.execution.registry import load_backend
show_progress(sys.argv[2])
load_backend(ModelConfig(sys.argv[1], dtype="float32", device="cpu"))
"""


def test_a_worker_says_what_it_loaded_and_how_long_that_took(tmp_path):
    path = str(save_llama(tmp_path / "model", seed=0))
    process = subprocess.run([sys.executable, "-c", LOAD, path, "text"], capture_output=True, text=True, check=True)
    [line] = process.stderr.splitlines()
    assert line.startswith("INFO ")
    assert f"{path}: 0.0 M parameters in float32 on cpu, loaded in " in line


def test_a_worker_says_it_as_json_on_request(tmp_path):
    path = str(save_llama(tmp_path / "model", seed=0))
    command = [sys.executable, "-c", LOAD, path, "json"]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    line = json.loads(process.stderr)
    assert line["levelname"] == "INFO"
    assert line["message"].startswith(f"{path}: 0.0 M parameters")


def test_what_is_imported_is_left_out_of_garbage_collections_which_go_on_afterwards():
    before = gc.get_freeze_count()
    try:
        with _importing():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
        with pytest.raises(ImportError), _importing():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
