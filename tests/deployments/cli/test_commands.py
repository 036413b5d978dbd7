"""`paceline`: its commands, what they import and what they pass on."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from deployments.cli import commands, serve
from deployments.cli.commands import app
from tests.deployments.cli.http_stand_in import stand_in

ROOT = Path(__file__).parents[3]
COMMANDS = ("serve", "chat", "complete", "pull", "evaluate", "load", "settings", "version", "doctor", "prove", "audit")
HELP = """
import sys
sys.argv = ["paceline", "--help"]
try:
    from deployments.cli.commands import main
    main()
finally:
    print(sorted({name.partition(".")[0] for name in sys.modules} & set(%r)))
"""
SLOW = ("torch", "ray", "transformers", "pydantic", "fastapi", "httpx", "httpx2", "huggingface_hub", "numpy")


def test_help_names_every_command_and_imports_nothing_that_takes_time() -> None:
    program = [sys.executable, "-c", HELP % (SLOW,)]
    shown = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"
    lines = [line.split(maxsplit=1) for line in shown.partition("Commands")[2].splitlines()]
    described = {line[0]: line[1] for line in lines if len(line) == 2}
    assert described.keys() >= set(COMMANDS)
    assert not [text for name, text in described.items() if name in COMMANDS and "..." in text]


def test_a_shell_completes_commands_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, expected in (("paceline ser", "serve"), ("paceline serve target_m", "target_model=")):
        variables = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        result = CliRunner().invoke(app, [], prog_name="paceline", env=variables)
        assert result.stdout.split() == [expected]


def test_serve_hands_on_settings_and_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    told: list[tuple[dict[str, str], str, int]] = []
    monkeypatch.setattr(serve, "serve_here", lambda *arguments: told.append(arguments))
    for words in (["a=1", "--port", "1", "b=2", "--host", "h", "--demo"], []):
        assert CliRunner().invoke(app, ["serve", *words]).exit_code == 0
    assert told == [({"a": "1", "b": "2", "page": "demo"}, "h", 1), ({}, "127.0.0.1", 8000)]


@pytest.mark.parametrize("command", ["evaluate", "load"])
def test_a_command_with_its_own_parser_gets_every_word(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []

    def main(words: list[str]) -> int:
        told.append(words)
        return 3

    monkeypatch.setitem(sys.modules, "engine.training.__main__", SimpleNamespace(main=main))
    monkeypatch.setattr(commands, "import_module", lambda name: SimpleNamespace(main=main))
    assert CliRunner().invoke(app, [command, "--k", "2", "--help", "x"]).exit_code == 3
    assert told == [[*([command] if command == "evaluate" else []), "--k", "2", "--help", "x"]]


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with stand_in(lambda request: request.answer(401, b'{"error": {"message": "wrong key"}}')) as url:
        monkeypatch.setattr("sys.argv", ["paceline", "complete", "x", "--url", url])
        with pytest.raises(SystemExit) as ended:
            commands.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: {url}/v1/models: the answer is 401: wrong key\n"
