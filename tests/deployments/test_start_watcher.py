"""The program that watches a start: which process it ends, when and why."""

import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments import start_watcher as module

SOURCE = Path(module.__file__)
PARENT = """
import os, subprocess, sys
numbers = [str(os.getpid()), {silence_s!r}, {limit_s!r}]
watcher = subprocess.Popen([sys.executable, "-I", "-S", {source!r}, *numbers], stdin=subprocess.PIPE)
{then}
"""
KILLED = -9


def run_parent(then: str, *, silence_s: float, limit_s: float) -> subprocess.CompletedProcess[str]:
    script = PARENT.format(source=str(SOURCE), silence_s=str(silence_s), limit_s=str(limit_s), then=then)
    return subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False)


def test_it_needs_no_packages() -> None:
    """It is started beside each replica, and imports nothing slow."""
    imports = re.findall(r"^(?:from|import) (\w+)", SOURCE.read_text(), re.MULTILINE)
    assert set(imports) <= sys.stdlib_module_names


def test_a_process_that_is_silent_is_ended() -> None:
    ended = run_parent("watcher.wait()", silence_s=0.2, limit_s=600)
    assert ended.returncode == KILLED
    assert re.search(r"process \d+ is ended, because its start hangs: it did not answer for 0.2 s", ended.stderr)


def test_a_process_that_answers_is_ended_at_the_limit() -> None:
    answer = "while True: watcher.stdin.write(b'.'); watcher.stdin.flush()"
    ended = run_parent(answer, silence_s=60, limit_s=0.5)
    assert ended.returncode == KILLED
    assert "it took longer than 0.5 s" in ended.stderr


def test_a_process_that_has_started_lives() -> None:
    ended = run_parent("watcher.stdin.close(); sys.exit(watcher.wait())", silence_s=60, limit_s=600)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_it_ends_with_the_process_that_has_started_it() -> None:
    ended = run_parent("os._exit(7)", silence_s=60, limit_s=600)  # returns when nobody has its pipes open
    assert (ended.returncode, ended.stderr) == (7, "")


def test_it_ends_no_process_but_the_one_that_has_started_it() -> None:
    """A child of that one holds the pipe open, and another process may have the number by now."""
    then = "import time\nif os.fork() == 0: time.sleep(0.6)\nos._exit(0)"
    ended = run_parent(then, silence_s=0.2, limit_s=600)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("gap_s", "expected"), [(1000.0, None), (1.0, "it did not answer for 10 s")])
def test_a_time_for_which_both_were_stopped_is_one_step(
    gap_s: float, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that is paused. Then the other process answers; else each of ten steps is silent."""
    times = itertools.accumulate(itertools.repeat(gap_s))
    looks = iter([[], [0], *([[]] * 10)])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(module, "select", SimpleNamespace(select=lambda *_: (next(looks), [], [])))
    reads = iter([b"."] if expected else [b""])
    monkeypatch.setattr(module, "os", SimpleNamespace(read=lambda *_: next(reads)))
    monkeypatch.setattr(module, "sys", SimpleNamespace(stdin=SimpleNamespace(fileno=lambda: 0)))
    assert module.watch(silence_s=10.0, limit_s=600.0) == expected
