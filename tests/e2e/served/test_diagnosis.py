"""The commands of diagnosis against a server: its texts are proved and audited, and falsified records are found."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli.commands import app
from deployments.diagnosis import prove, trial
from deployments.diagnosis.http_client import Client

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(prove, "TEMPERATURES", (0.7,))
    monkeypatch.setattr(trial, "TRIAL_S", 0.0)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_texts_are_proved_and_audited_and_a_falsified_token_is_found(url, tmp_path):
    (tmp_path / "texts").write_text("Up betimes and to my office,\n\nThis PEP proposes")
    status, page = run("prove", "--url", url, "--texts", str(tmp_path / "texts"), "--out", str(tmp_path))
    assert (status, page.splitlines()[0]) == (0, "# All texts are equal")
    answers = tmp_path / "answers.jsonl"
    first, second = map(json.loads, answers.read_text().split("\n")[:2])
    ids = second["choices"][0]["token_ids"]
    right, ids[11] = ids[11], ids[11] + 1
    answers.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    for where in (("--url", url), ("--target-model", "bundled", "compile=off")):
        status, report = run("audit", str(answers), *where)
        assert status == 1, report
        assert "1 equal, 0 near, 1 different, 0 not checked" in report
        assert f"answers.jsonl:2, choice 0, token 11: {right + 1} " in report
        assert f"the target writes {right} " in report


CHAT = {"system": "Answer as Pepys.", "temperature": 0.8, "top_p": 0.9, "seed": 5}
SWAPPED = ({}, {"system": "Answer as a PEP."}, {"temperature": 1.0}, {"top_p": 0.5}, {"seed": 6})


def test_swapped_fields_are_found_and_all_in_one_record_of_two_choices(url, tmp_path):
    def body(fields: dict[str, Any]) -> dict[str, Any]:
        words = CHAT | fields
        system = {"role": "system", "content": words.pop("system")}
        return words | {"messages": [system, {"role": "user", "content": "What did you do?"}], "n": 2, "max_tokens": 60}

    answer = Client(url).post("/v1/chat/completions", body({}) | {"speculative": {"record": True}})
    records = [answer["record"] | {"body": body(change), "seed": None} for change in SWAPPED]
    (tmp_path / "records").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    status, report = run("audit", str(tmp_path / "records"), "--url", url)
    assert status == 1
    assert "1 equal, 0 near, 4 different, 0 not checked" in report
    for line in range(2, 6):
        assert f"different: records:{line}, choice" in report


def test_processes_are_not_killed_without_the_demo_page(url):
    status, message = run("prove", "--url", url, "--kill", "target")
    assert (status, "page=demo" in message) == (2, True)


def test_a_server_is_examined(url):
    findings = {finding["subject"]: finding for finding in json.loads(run("doctor", "--url", url, "--json")[1])}
    assert {findings[name]["level"] for name in ("health", "version", "pace")} == {"ok"}
    assert {"speed-up", "drafts", "acceptance", "recoveries", "queue"} <= findings.keys()
    assert "server" not in findings
