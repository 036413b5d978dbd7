import contextlib
import os
import signal
from types import SimpleNamespace

import click
import pytest

from deployments.cli import commands, serve


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Serve with these arguments until that fails; return the exit status."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # which the command sets
    monkeypatch.setattr("sys.argv", ["paceline", "serve", *arguments])
    with pytest.raises(SystemExit) as error:
        commands.main()
    assert isinstance(error.value.code, int)
    return error.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["num_speculative_token=3"], "did you mean num_speculative_tokens?"),
        (["drafting=os:system"], "drafting is 'os:system', which is <built-in function system>; it must be a class of"),
        (["drafting=..:x"], "drafting is '..:x', which cannot be imported"),
        (["verification=os:system"], "it must be an engine.verification.rule.Rule"),
        (["target_model=/no/where"], "model directory /no/where does not exist"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000: Cannot assign requested address; choose another"),
        (["api_key_file=/bin/true"], "api_key_file: "),
        (["num_speculative_tokens"], "not of the form name=value"),
        (["--nothing"], "No such option: --nothing"),
    ],
)
def test_a_setting_with_which_nothing_can_start_is_named_in_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_usage = arguments in (["num_speculative_tokens"], ["--nothing"])
    assert run(arguments, monkeypatch) == 1 + is_usage
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 or is_usage
    assert message in captured.err


ERROR = "Traceback\n  ...\nengine.errors.{}: no such model\n"


@pytest.mark.parametrize(
    ("states", "ends"),
    [
        ([("DEPLOYING", "UPDATING", ERROR.format("TargetError")), ("RUNNING", "HEALTHY", "")], None),
        ([("DEPLOYING", "UPDATING", ERROR.format("ModelError"))], "the application did not start: no such model"),
        ([("DEPLOYING", "DEPLOY_FAILED", ERROR.format("TargetError"))], "the application did not start: no such model"),
    ],
    ids=["tried again", "no use in trying", "given up"],
)
def test_a_start_ends_when_no_retry_can_help(
    states: list[tuple[str, str, str]], ends: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status() -> SimpleNamespace:
        application, ingress, message = states.pop(0)
        both = {"Router": ("UPDATING", ""), "Ingress": (ingress, message)}
        deployments = {name: SimpleNamespace(status=one, message=text) for name, (one, text) in both.items()}
        return SimpleNamespace(applications={"default": SimpleNamespace(status=application, deployments=deployments)})

    monkeypatch.setattr(serve.serve, "status", status)
    with contextlib.nullcontext() if ends is None else pytest.raises(click.ClickException, match=ends):
        serve._wait_for_start()
    assert states == []


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
