"""Scratch folders: removed by their process, or by the next one if that was killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.execution.scratch import scratch_folder


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def folder_of_a_process(parent, *, then):
    script = (
        f"import sys, tempfile; tempfile.tempdir = {str(parent)!r}\n"
        "from engine.execution.scratch import scratch_folder\n"
        f"folder = scratch_folder(); print(folder.name, flush=True); {then}"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3], text=True, **pipes)
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir()
    return process, folder


def end(process):
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_no_other(parent):
    stranger = parent / "paceline-bench"
    stranger.mkdir()
    living, kept = folder_of_a_process(parent, then="sys.stdin.read()")
    killed, left = folder_of_a_process(parent, then="sys.stdin.read()")
    killed.kill()
    end(killed)
    assert left.is_dir()
    with scratch_folder() as name:
        assert {*parent.iterdir()} == {stranger, kept, Path(name)}
        assert os.stat(name).st_mode & 0o077 == 0, "it is for this user"
        Path(name, "file").touch()
    end(living)
    assert {*parent.iterdir()} == {stranger}
