import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.cli import commands, serve


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["num_speculative_token=3"], "did you mean num_speculative_tokens?"),
        (["num_speculative_tokens=many"], "num_speculative_tokens is 'many'"),
        (["num_speculative_tokens"], "not of the form name=value"),
        (["--nothing"], "No such option: --nothing"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line_before_anything_starts(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # which the command sets
    monkeypatch.setattr("sys.argv", ["paceline", "serve", *arguments])
    with pytest.raises(SystemExit) as error:
        commands.main()
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_why_an_application_did_not_start_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    deployments = {
        "Router": SimpleNamespace(status="UPDATING", message=""),
        "Ingress": SimpleNamespace(status="DEPLOY_FAILED", message="Traceback\n  ...\nModelError: no such model\n"),
    }
    status = SimpleNamespace(applications={"default": SimpleNamespace(deployments=deployments)})
    monkeypatch.setattr(serve.serve, "status", lambda: status)
    assert serve._failures() == ["ModelError: no such model"]


@pytest.mark.parametrize(("later_s", "exits"), [(0.0, False), (0.9, False), (1.1, True)])
def test_two_signals_within_a_second_are_one(later_s: float, exits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    exit_at = serve.ExitAtSignal()
    monkeypatch.setattr(serve.time, "monotonic", lambda: 0.0)
    with pytest.raises(SystemExit) as first:
        exit_at(signal.SIGTERM, None)
    assert first.value.code == 0
    monkeypatch.setattr(serve.time, "monotonic", lambda: later_s)
    with pytest.raises(SystemExit) if exits else contextlib.nullcontext():
        exit_at(signal.SIGINT, None)


SERVER = """
import signal, subprocess, sys, time
from deployments.cli import commands, serve

with serve.group_of_children():
    child = subprocess.Popen(["sleep", "60"])
signal.signal(signal.SIGTERM, serve.ExitAtSignal())
try:
    print("serving", flush=True)
    time.sleep(60)
finally:
    time.sleep(0.5)  # streams finish
    print("child ended" if child.poll() is not None else "finished", flush=True)
    child.kill()
"""
"""Ends as the server does, with a process in place of Ray's."""


def test_a_server_starts_although_the_group_of_its_shell_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []

    def move(_process: int, group: int) -> None:
        groups.append(group)
        if len(groups) == 2:
            raise PermissionError

    monkeypatch.setattr(os, "setpgid", move)
    with serve.group_of_children():
        pass
    assert groups[1] == os.getpgrp()


def test_a_signal_to_make_and_its_process_group_lets_streams_finish(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "Makefile").write_text(f"serve:\n\t@{sys.executable} {tmp_path / 'server.py'}\n")
    command = ["timeout", "60", "make", "--no-print-directory", "-f", str(tmp_path / "Makefile")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        assert process.stdout
        assert process.stdout.readline() == "serving\n"
        process.send_signal(signal.SIGTERM)  # which `timeout` sends to make, and to the process group
        output, errors = process.communicate(timeout=30)
    assert output == "finished\n"
    assert "Error" not in errors
