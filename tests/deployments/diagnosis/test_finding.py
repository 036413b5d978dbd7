import pytest

from deployments.diagnosis import finding as module
from deployments.diagnosis.finding import Finding, show

FOUND = [Finding("ok", "CPU", "2 cores"), Finding("error", "target", "[gone]", "pull it")]


def test_findings_are_lines_and_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys):
    show(FOUND, as_json=False)
    assert capsys.readouterr().out == "ok: CPU: 2 cores\nerror: target: [gone]; pull it\n"
    console = module.Console
    monkeypatch.setattr(module, "Console", lambda: console(force_terminal=True, width=100))
    show(FOUND, as_json=False)
    assert "[gone]" in capsys.readouterr().out
