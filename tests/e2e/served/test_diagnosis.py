"""The commands of diagnosis against a server: its texts are proved and made again, and a falsified token is found."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.commands import app
from deployments.diagnosis import prove, trial

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(prove, "TEMPERATURES", (0.7,))
    monkeypatch.setattr(trial, "TRIAL_S", 0.0)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_texts_are_proved_and_made_again_and_a_falsified_token_is_found(url, tmp_path):
    (tmp_path / "texts").write_text("Up betimes and to my office,\n\nThis PEP proposes")
    status, page = run("prove", "--url", url, "--texts", str(tmp_path / "texts"), "--out", str(tmp_path))
    assert (status, page.splitlines()[0]) == (0, "# All texts are equal")
    answers = tmp_path / "answers.jsonl"
    first, second, *_ = map(json.loads, answers.read_text().split("\n")[:2])
    ids = second["answer"]["choices"][0]["token_ids"]
    right, ids[11] = ids[11], ids[11] + 1
    answers.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    status, report = run("replay", str(answers), "--url", url)
    assert (status, report.splitlines()[0]) == (1, "1: equal: 32 tokens")
    assert f"2: different: choice 0, token 11: {right + 1} " in report
    assert f"now it is {right} " in report


def test_processes_are_not_killed_without_the_demo_page(url):
    status, message = run("prove", "--url", url, "--kill", "target")
    assert (status, "page=demo" in message) == (2, True)


def test_a_server_is_examined(url):
    findings = {finding["subject"]: finding for finding in json.loads(run("doctor", "--url", url, "--json")[1])}
    assert {findings[name]["level"] for name in ("health", "version", "pace")} == {"ok"}
    assert {"speed-up", "drafts", "acceptance", "recoveries", "queue"} <= findings.keys()
    assert "server" not in findings
