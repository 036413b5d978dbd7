"""AuditReport: what many audits say together, and the exit status."""

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.diagnosis.audit_report import AuditReport, audit_files
from deployments.diagnosis.auditors import server_auditor
from deployments.records.record import Record, RecordedChoice
from deployments.records.record_reader import AuditBody
from tests.deployments.diagnosis.fake import FakePaceline, audit_body, difference

RECORD = Record(path="/v1/completions", body={}, seconds=2.0, choices=[RecordedChoice(token_ids=[1])])
NEAR, FAR = difference(3, 5, 6, 0.00002), difference(2, 7, 8, 1.5)


def report_of(*bodies: Any, near: float = 0.0) -> AuditReport:
    report = AuditReport(near)
    for number, body in enumerate(bodies):
        outcome = body if isinstance(body, str) else AuditBody.model_validate(body)
        report.add(f"a.jsonl:{number}", RECORD, outcome)
    return report


@pytest.mark.parametrize(
    ("bodies", "near", "counts", "status"),
    [
        ([audit_body([])], 0.0, {"equal": 1}, 0),
        ([audit_body([NEAR])], 0.0, {"different": 1}, 1),
        ([audit_body([NEAR]), audit_body([])], 1e-3, {"near": 1, "equal": 1}, 0),
        ([audit_body([NEAR, FAR])], 1e-3, {"different": 1}, 1),
        ([audit_body([difference(2, 7, 8, 9999.0)])], 100.0, {"different": 1}, 1),
        ([audit_body([], problems=["the target continues"])], 1.0, {"different": 1}, 1),
        ([audit_body([], logprobs_apart=0.1)], 0.0, {"different": 1}, 1),
        ([audit_body([FAR], is_tokenized=True)], 0.0, {"not checked": 1}, 2),
        ([audit_body([], is_tokenized=True)], 0.0, {"equal": 1}, 0),
        ([audit_body([]), "seed is missing"], 0.0, {"equal": 1, "not checked": 1}, 2),
        ([audit_body([FAR]), "seed is missing"], 0.0, {"different": 1, "not checked": 1}, 1),
        ([], 0.0, {}, 2),
    ],
)
def test_answers_are_counted_and_decide_the_status(bodies: Any, near: float, counts: dict[str, int], status: int):
    report = report_of(*bodies, near=near)
    assert (dict(report.counts), report.status) == (counts, status)


def test_the_report_names_speeds_servers_reasons_places_and_margins() -> None:
    texts = [audit_body([FAR, NEAR]), audit_body([NEAR]), audit_body([]), "no seed", "no seed"]
    lines = list(report_of(*texts, audit_body([difference(2, 7, 8, 9999.0)])).lines(4.0))
    assert lines == [
        "4 answers of 32 tokens in 4.0 s: 8 tokens/s",
        "writing them took 8.0 s, 4 tokens/s each",
        "written by fp_0, audited by fp_1",
        "1 equal, 0 near, 3 different, 2 not checked",
        "not checked: 2, the first at a.jsonl:3: no seed",
        "different: a.jsonl:5, choice 0, token 2: 7 '<7>', the target writes 8 '<8>', margin 9999",
        "different: a.jsonl:0, choice 0, token 2: 7 '<7>', the target writes 8 '<8>', margin 1.5",
        "different: a.jsonl:1, choice 0, token 3: 5 '<5>', the target writes 6 '<6>', margin 2e-05",
        f"margins from 1e-05 {'#' * 40} 2",
        f"margins from 1e+00 {'#' * 20} 1",
        f"margins from 1e+03 {'#' * 20} 1",
    ]


def test_a_near_tie_before_a_difference_is_not_its_place() -> None:
    lines = report_of(audit_body([difference(1, 5, 6, 0.0001), FAR]), near=0.01).lines(1.0)
    assert any("choice 0, token 2: 7" in line for line in lines)


def test_files_are_audited_and_the_report_printed(
    server: FakePaceline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body: dict[str, Any] = {
        "prompt": "a",
        "temperature": 0.7,
        "seed": 1,
        "max_tokens": 8,
        "speculative": {"record": True},
    }
    record = server.client.post("/v1/completions", body)["record"]
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    assert audit_files(tmp_path, server_auditor(server.client), 0.0) == 0
    assert "1 equal" in capsys.readouterr().out
    record["choices"][0]["token_ids"][4] += 1
    (tmp_path / "b.jsonl").write_text(json.dumps(record) + "\n{\n")
    assert audit_files(tmp_path, server_auditor(server.client), 0.0) == 1
    said = capsys.readouterr().out
    assert "1 equal, 0 near, 1 different, 1 not checked" in said
    assert "b.jsonl:1, choice 0, token 4" in said
    assert audit_files(tmp_path, server_auditor(server.client), 0.05) == 2, "for the wrong line"
