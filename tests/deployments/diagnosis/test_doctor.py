import functools
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from deployments.cli import commands
from deployments.config import AppConfig
from deployments.diagnosis import doctor
from deployments.diagnosis.finding import Finding

run = functools.partial(CliRunner().invoke, commands.app)


def test_doctor_exits_with_1_if_there_is_an_error():
    result = run(["doctor", "--json", "target_model=no/such"])
    assert result.exit_code == 1
    assert {one["level"] for one in json.loads(result.output) if one["subject"] == "target"} == {"error"}
    assert "trial" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "temperatur=1"], "unknown argument temperatur"),
        (["audit", "/no/such"], "no such file"),
        (["prove", "--url", "http://127.0.0.1:1"], "127.0.0.1:1/v1/completions"),
    ],
)
def test_errors_are_one_line(arguments, message):
    result = run(arguments)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert message in result.output


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
