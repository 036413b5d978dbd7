"""A start that hangs ends its process, whether the process is stopped or waits; one that does not is left alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from deployments import start_watcher, starting
from deployments.starting import GRACE_S, watched_start

PROGRAM = Path(start_watcher.__file__)
SCRIPT = """
import sys, time
from deployments import starting
starting.GRACE_S = 0.0
with starting.watched_start(float(sys.argv[1]), float(sys.argv[2])):
    print("starting", flush=True)
    {start}
print("started", flush=True)
sys.stdin.read()
"""


def watchers(pid):
    return [child for child in psutil.Process(pid).children() if str(PROGRAM) in child.cmdline()]


@pytest.fixture
def run():
    processes = []

    def run(start, *, hang_timeout_s, start_timeout_s):
        command = [sys.executable, "-c", SCRIPT.format(start=start), str(hang_timeout_s), str(start_timeout_s)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(command, **pipes, text=True)
        processes.append(process)
        assert process.stdout.readline() == "starting\n"
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_a_process_that_is_stopped_while_it_starts_is_ended(run):
    process = run("time.sleep(60)", hang_timeout_s=0.5, start_timeout_s=600)
    process.send_signal(signal.SIGSTOP)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert f"process {process.pid} is ended, because its start hangs: it did not answer for 0.5 s" in errors


def test_a_start_that_waits_for_ever_is_ended_at_its_limit(run):
    process = run("time.sleep(60)", hang_timeout_s=60, start_timeout_s=0.5)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert "it took longer than 0.5 s" in errors


def test_a_start_may_take_longer_than_a_silence(run):
    process = run("time.sleep(1.0)", hang_timeout_s=0.5, start_timeout_s=600)
    assert process.stdout.readline() == "started\n"


def test_a_process_that_has_started_is_not_watched_any_more(run):
    process = run("pass", hang_timeout_s=0.2, start_timeout_s=0.2)
    assert process.stdout.readline() == "started\n"
    assert psutil.Process(process.pid).children() == []


def test_a_start_that_fails_is_not_watched_any_more():
    with pytest.raises(ValueError, match="bad model"), watched_start(60, 600):
        raise ValueError("bad model")
    assert watchers(os.getpid()) == []


def test_the_end_of_the_watcher_is_logged(caplog):
    with watched_start(0.1, 600):
        [watcher] = watchers(os.getpid())
        watcher.kill()
        [answering] = [thread for thread in threading.enumerate() if "watcher" in thread.name]
        answering.join()
    assert "the process that watches this start has ended" in caplog.text


def test_a_start_that_fails_by_itself_has_time_to_say_why():
    with watched_start(60, 600):
        [watcher] = watchers(os.getpid())
        assert watcher.cmdline()[-2:] == ["60", str(600 + GRACE_S)]
    assert GRACE_S == 30


def test_a_watcher_that_is_stopped_holds_no_start_up():
    def start():
        with watched_start(60, 600):
            watchers(os.getpid())[0].suspend()

    starting_thread = threading.Thread(target=start, daemon=True)
    starting_thread.start()
    starting_thread.join(20)
    assert not starting_thread.is_alive()
    assert watchers(os.getpid()) == []


def test_the_thread_answers_often_and_has_ended_before_its_pipe_is_closed(monkeypatch):
    threads = []

    def answer(pipe, has_started, period_s):
        has_started.wait()
        time.sleep(0.05)
        threads.append((period_s, pipe.closed))

    monkeypatch.setattr(starting, "_answer", answer)
    with watched_start(60, 600):
        pass
    assert threads == [(6.0, False)], "ten answers within a silence, and an open pipe for them"
