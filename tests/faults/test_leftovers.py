"""What is left of a server is found: processes, temporary files and shared memory, but nobody else's."""

import mmap
import os
import secrets
import subprocess
import sys

import pytest

from tests.faults import leftovers
from tests.faults.leftovers import SHARED_MEMORY, Belongings


@pytest.fixture
def belongings(monkeypatch):
    monkeypatch.setattr(leftovers, "END_S", 0.0)
    return Belongings()


def run(script, variables):
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline()
    return process


def end(process):
    process.stdin.close()
    process.wait()
    process.stdout.close()


SCRIPT = "import tempfile, sys; {}; print('ready', flush=True); sys.stdin.read()"


def test_a_process_that_goes_on_is_found(belongings):
    other, ours = (run(SCRIPT.format("pass"), variables) for variables in ({}, belongings.variables))
    [found] = belongings.left()
    assert found.startswith(f"process {ours.pid}: ")
    end(ours)
    end(other)


def test_temporary_files_are_found_except_rays(belongings):
    script = "tempfile.mkdtemp(prefix='paceline-'); tempfile.mkdtemp(prefix='pymp-')"
    end(run(SCRIPT.format(script), belongings.variables))
    [found] = belongings.left()
    assert found.startswith("temporary file: paceline-")


def test_the_scratch_folder_of_a_killed_process_is_not_left(belongings):
    script = "from engine.execution.scratch import scratch_folder; folder = scratch_folder()"
    process = run(SCRIPT.format(script), belongings.variables)
    process.kill()
    end(process)
    assert belongings.left() == []


def test_shared_memory_is_found_if_its_process_had_it_when_it_was_noted(belongings):
    path = f"{SHARED_MEMORY}paceline-test-{secrets.token_hex(4)}"
    with open(path, "wb") as file:
        file.write(bytes(mmap.PAGESIZE))
    try:
        process = run(SCRIPT.format(f"file = open({path!r})"), belongings.variables)
        belongings.note()
        end(process)
        assert belongings.left() == [f"shared memory: {path}"]
    finally:
        os.unlink(path)
