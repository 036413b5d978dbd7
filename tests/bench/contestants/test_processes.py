"""Processes of another application are stopped and let go, whole trees of them, and their CPU time is read."""

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.bench.contestants.processes import NAMES, cpu_seconds, freeze, thaw

PROGRAM = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


@pytest.fixture
def tree() -> Iterator[psutil.Process]:
    """A process that has a child, which waits for a line."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE) as process:
        root = psutil.Process(process.pid)
        while not root.children():
            pass
        yield root
        thaw(root.pid)
        process.communicate(b"\n")


def statuses(root: psutil.Process) -> set[str]:
    return {process.status() for process in (root, *root.children(recursive=True))}


def test_what_is_frozen_does_nothing_until_it_is_thawed(tree: psutil.Process) -> None:
    freeze(tree.pid)
    deadline = time.monotonic() + 30  # a process that runs is stopped when its core looks at its signals
    while statuses(tree) != {psutil.STATUS_STOPPED}:
        assert time.monotonic() < deadline
    thaw(tree.pid)
    assert psutil.STATUS_STOPPED not in statuses(tree)


def test_cpu_time_is_that_of_the_whole_tree_by_title() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\n"
    router = busy + "print(flush=True)\ninput()"
    program = (
        f"{busy}import subprocess, sys\nsubprocess.run([sys.executable, '-c', {router!r}, 'ray::Rou' + 'ter.generate'])"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"\n"
        seconds = cpu_seconds(process.pid)
        process.communicate(b"\n")
    assert list(seconds) == list(NAMES)
    assert 0.28 <= seconds["Router"] < 2
    assert 0.28 <= seconds["Ray"] < 2
    assert seconds["target"] == 0
