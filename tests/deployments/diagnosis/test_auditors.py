"""Auditors: a server that is busy is asked again, and a target in this process finds what a server would."""

from typing import Any

import pytest

from deployments.config import ArgumentError
from deployments.diagnosis import auditors
from deployments.diagnosis.auditors import Auditor, local_auditor, server_auditor
from deployments.diagnosis.http_client import ServerError
from deployments.records.record import Record, RecordedChoice
from deployments.records.record_reader import AuditBody
from engine.llm import LLM
from engine.params import SamplingParams
from tests.deployments.diagnosis.fake import FakePaceline

BODY: dict[str, Any] = {"prompt": "a", "temperature": 0.7, "seed": 1, "max_tokens": 8}


def written(server: FakePaceline, **changes: Any) -> Record:
    body = BODY | changes
    return Record(path="/v1/completions", body=body, choices=[RecordedChoice(token_ids=server.ids_of(body))])


def test_a_server_audits_a_few_records_at_once_in_their_order(server: FakePaceline) -> None:
    records = [written(server, seed=seed) for seed in range(20)]
    records[7].choices[0].token_ids[3] += 1  # type: ignore[index]
    found = server_auditor(server.client)(records)
    bodies = [body for body in found if not isinstance(body, str)]
    assert [bool(body.choices[0].differences) for body in bodies] == [seed == 7 for seed in range(20)]


def test_a_busy_server_is_asked_again_and_a_refusal_is_a_reason(
    server: FakePaceline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(auditors.time, "sleep", pauses.append)
    audit, record = server_auditor(server.client), written(server)
    server.audit_statuses = [503, 429]
    assert isinstance(audit([record])[0], AuditBody)
    assert len(pauses) == 2
    server.audit_statuses = [400]
    assert str(audit([record])[0]).endswith("seed is missing")
    for statuses in ([401], [429] * 20):
        server.audit_statuses = statuses
        with pytest.raises(ServerError):
            audit([record])


@pytest.fixture(scope="module")
def local() -> Auditor:
    return local_auditor({"target_model": "bundled", "compile": "off"})


@pytest.fixture(scope="module")
def answers() -> list[Record]:
    """Answers to completions with two prompts and two choices, as an engine with drafts writes them."""
    llm, prompts = LLM(compile="off"), ["This PEP proposes", "Up betimes and"]
    records = []
    for seed in (3, 4):
        params = SamplingParams(temperature=0.8, seed=seed, n=2, max_tokens=40, logprobs=0, stop=["\n"])
        outputs = [output for result in llm.generate(prompts, params) for output in result.outputs]
        choices = [
            RecordedChoice(
                token_ids=output.token_ids,
                text=output.text,
                finish_reason=output.finish_reason,  # type: ignore[arg-type]
                logprobs=[entry.logprob for entry in output.logprobs or ()],
            )
            for output in outputs
        ]
        body = {"prompt": prompts, "temperature": 0.8, "seed": seed, "n": 2, "max_tokens": 40, "stop": "\n"}
        records.append(Record(path="/v1/completions", body=body | {"logprobs": 0, "model": "x"}, choices=choices))
    return records


def test_a_target_here_passes_what_was_written_with_drafts(local: Auditor, answers: list[Record]) -> None:
    for body in local(answers):
        assert not isinstance(body, str), body
        assert len(body.choices) == 4
        assert all(choice.is_equal(0.0) for choice in body.choices)


def test_a_target_here_finds_a_falsified_token_and_says_what_it_cannot_check(
    local: Auditor, answers: list[Record]
) -> None:
    wrong = answers[0].model_copy(deep=True)
    ids = wrong.choices[2].token_ids or []
    ids[5] += 1
    unchecked = answers[1].model_copy(update={"choices": answers[1].choices[:3]})
    first, second, third = local([wrong, unchecked, answers[1]])
    assert not isinstance(first, str)
    assert [choice.is_equal(0.0) for choice in first.choices] == [True, True, False, True]
    difference = first.choices[2].differences[0]
    assert (difference.position, difference.token_id) == (5, ids[5])
    assert difference.margin > 0
    assert second == "choices has 3 texts, the request asks for 4"
    assert not isinstance(third, str)
    assert all(choice.is_equal(0.0) for choice in third.choices)


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ArgumentError, match="target_modell"):
        local_auditor({"target_modell": "bundled"})
