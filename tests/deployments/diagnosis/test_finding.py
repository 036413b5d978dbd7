import json

import pytest

from deployments.diagnosis import finding as module
from deployments.diagnosis.finding import Finding, judged, show

FOUND = [Finding("ok", "CPU", "2 cores"), Finding("error", "target", "[gone]", "pull it")]


def test_findings_are_lines_where_no_terminal_is(capsys):
    show(FOUND, as_json=False)
    assert capsys.readouterr().out.splitlines() == ["ok: CPU: 2 cores", "error: target: [gone]; pull it"]


def test_findings_are_json_on_request(capsys):
    show(FOUND, as_json=True)
    assert json.loads(capsys.readouterr().out)[1] == {
        "level": "error",
        "subject": "target",
        "found": "[gone]",
        "advice": "pull it",
    }


def test_findings_are_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys):
    console = module.Console
    monkeypatch.setattr(module, "Console", lambda: console(force_terminal=True, width=100))
    show(FOUND, as_json=False)
    assert "[gone]" in capsys.readouterr().out


def test_advice_makes_a_warning():
    assert judged("queue", "3", "wait").level == "warning"
    assert judged("queue", "0", "").level == "ok"
