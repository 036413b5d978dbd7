import pytest

from deployments.diagnosis import finding as module
from deployments.diagnosis.finding import Finding, judged, show

FOUND = [Finding("ok", "CPU", "2 cores"), Finding("error", "target", "[gone]", "pull it")]


def test_findings_are_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys):
    console = module.Console
    monkeypatch.setattr(module, "Console", lambda: console(force_terminal=True, width=100))
    show(FOUND, as_json=False)
    assert "[gone]" in capsys.readouterr().out


def test_advice_makes_a_warning():
    assert judged("queue", "3", "wait").level == "warning"
    assert judged("queue", "0", "").level == "ok"
