"""A full disk in the cache folder: the model is served eagerly, the text stays, and one line of the log says why."""

import subprocess
import threading

import pytest

from engine import LLM, SamplingParams
from engine.execution.cpu.compilation import packages

PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=24)


@pytest.fixture
def full_disk(tmp_path, monkeypatch):
    """A file system of one file's size."""
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"only root can mount a small file system: {mounted.stderr.strip()}")
    monkeypatch.setenv(packages.CACHE_VARIABLE, str(tmp_path))
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.long
@pytest.mark.skipif(not packages.has_compiler(), reason="there is no C++ compiler")
def test_a_full_cache_folder_changes_no_text_and_is_logged_once(full_disk, caplog):
    llm = LLM(drafting="none", num_blocks=64)
    text = llm.generate(["This PEP proposes"], PARAMS)[0].outputs[0].text
    for thread in threading.enumerate():
        if thread.name == "compiling":
            thread.join(300)
    assert llm.generate(["This PEP proposes"], PARAMS)[0].outputs[0].text == text
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "serving eagerly, compiling failed" in warning
    assert "No space left on device" in warning
    assert [path for path in full_disk.iterdir() if path.suffix != ".lock"] == []
