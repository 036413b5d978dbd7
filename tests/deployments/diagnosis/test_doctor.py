import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import commands
from deployments.config import AppConfig
from deployments.diagnosis import doctor, http_client
from deployments.diagnosis.finding import Finding
from deployments.diagnosis.http_client import Client
from tests.deployments.diagnosis.fake import FakePaceline

run = functools.partial(CliRunner().invoke, commands.app)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, server: FakePaceline, tmp_path: Path) -> None:
    monkeypatch.setattr(http_client, "Client", lambda url, key: server.client if "fake" in url else Client(url, key))
    monkeypatch.setenv("HOME", str(tmp_path))


def test_doctor_exits_with_1_if_there_is_an_error():
    result = run(["doctor", "--json", "target_model=no/such"])
    assert result.exit_code == 1
    assert {one["level"] for one in json.loads(result.output) if one["subject"] == "target"} == {"error"}
    assert "trial" not in result.output


def test_doctor_tries_the_pair():
    result = run(["doctor", "num_speculative_tokens=2"])
    assert result.exit_code == 0, result.output
    assert "trial: " in result.output


def test_doctor_checks_a_server_instead():
    result = run(["doctor", "--url", "http://fake"])
    assert result.exit_code == 0
    assert "ok: recoveries: 0" in result.output
    assert "CPU" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "temperatur=1"], "unknown argument temperatur"),
        (["replay", "/no/such"], "No such file"),
        (["prove", "--url", "http://127.0.0.1:1"], "127.0.0.1:1/v1/completions"),
    ],
)
def test_errors_are_one_line(arguments, message):
    result = run(arguments)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert message in result.output


def test_a_proof_is_written_and_its_answers_replayed(tmp_path: Path, server: FakePaceline):
    out = tmp_path / "out"
    assert run(["prove", "--url", "http://fake", "--out", str(out)]).exit_code == 0
    assert json.loads((out / "proof.json").read_text())["all_equal"]
    assert (out / "proof.md").read_text().startswith("# All texts are equal")
    answers = str(out / "answers.jsonl")
    assert run(["replay", answers, "--url", "http://fake"]).output.endswith(" equal\n")
    server.falsified = {False: 3}
    result = run(["replay", answers, "--url", "http://fake"])
    assert (result.exit_code, "1: different: choice 0, token 3" in result.output) == (1, True)
    server.falsified = {True: 3}
    assert run(["prove", "--url", "http://fake", "--out", str(out)]).exit_code == 1


def test_the_worst_findings_come_first(monkeypatch):
    found = [Finding(level, level, "") for level in ("ok", "warning", "error", "warning")]  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "machine_findings", lambda _: found)
    assert [finding.level for finding in doctor.worst(AppConfig())] == ["error", "warning"]


def test_the_worst_findings_need_no_torch():
    code = (
        "import sys; from deployments.diagnosis.doctor import worst; from deployments.config import AppConfig;"
        "worst(AppConfig()); assert 'torch' not in sys.modules"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
