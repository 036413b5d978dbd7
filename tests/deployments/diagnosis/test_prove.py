import pytest

from deployments.diagnosis import auditors
from deployments.diagnosis.prove import BATCH, Case, _problems, cases, page, prove
from tests.deployments.diagnosis.fake import FakePaceline, K

TEXTS = ["one", "two"]


def test_the_matrix_has_every_way_once():
    quick, full = ([*cases(K, (), is_full=is_full)] for is_full in (False, True))
    ways = {(case.drafts, case.num_at_once, case.is_streamed) for case in full}
    assert len(ways) == len(full) == (2 + K) * 2 * 2
    assert {case.drafts for case in quick} == {"off", "always 1", "always 4", "server's"}
    assert {case.drafts for case in cases(0, (), is_full=True)} == {"off", "server's"}


def test_equal_texts_are_proved(server: FakePaceline):
    proof, records = prove(server.client, TEXTS, (), is_full=False)
    assert proof["all_equal"]
    assert (proof["system_fingerprint"], len(proof["requests"])) == ("fp_1", 6)
    assert {record["body"]["temperature"] for record in records} == {0.0, 0.7, 1.0}
    assert proof["num_audited"] == len(records) == server.num_audits == 6, "equal answers are audited once"
    assert page(proof).startswith("# All texts are equal")
    assert "| off | 8 | True | None | 6 of 6 | 192 | 0 |" in page(proof)
    assert "| always 4 | 8 | True | None | 6 of 6 | 192 | 48 |" in page(proof)


def test_equal_texts_without_drafts_prove_nothing(server: FakePaceline):
    server.num_drafted = 0
    proof, _ = prove(server.client, TEXTS, (), is_full=False)
    assert not proof["all_equal"]
    assert not any(case["differences"] for case in proof["cases"])
    assert page(proof).startswith("# the server made no drafts; no drafts where there should be always 1")


def test_a_kill_under_no_stream_proves_nothing():
    case = Case("server's", {}, BATCH, is_streamed=True, killed="draft", num_draft_tokens=9)
    case.num_tokens = 9
    assert _problems([case]) == ["no stream ran when the draft was killed"]
    case.num_cut = 1
    assert _problems([case]) == []
    case.num_tokens = 0
    assert _problems([case]) == ["the server wrote no tokens"]


def test_processes_are_killed_under_streams(server: FakePaceline):
    proof, _ = prove(server.client, TEXTS, ["draft", "target"], is_full=False)
    assert server.killed == ["draft", "target"]
    assert [(case["killed"], case["num_at_once"]) for case in proof["cases"][:3]] == [
        ("draft", BATCH),
        ("target", BATCH),
        (None, 1),
    ]


def test_a_busy_server_is_asked_again_and_a_refused_audit_is_a_difference(
    server: FakePaceline, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(auditors.time, "sleep", lambda _: None)
    server.audit_statuses = [400, 503, 429]  # the last one first
    proof, _ = prove(server.client, TEXTS, (), is_full=False)
    errors = [each for case in proof["cases"] for each in case["differences"]]
    assert {(each["request"], each["error"].endswith("seed is missing")) for each in errors} == {(0, True)}
    assert not proof["all_equal"]


def test_a_wrong_token_is_found_at_its_position(server: FakePaceline):
    server.falsified = {True: 17}
    proof, _ = prove(server.client, TEXTS, (), is_full=False)
    assert not proof["all_equal"]
    wrong = [case for case in proof["cases"] if case["differences"]]
    assert {case["is_streamed"] for case in wrong} == {True}
    assert proof["num_audited"] == 12
    for (first,) in (each["differences"] for case in wrong for each in case["differences"]):
        assert first["position"] == 17
        assert first["token_id"] == first["target_token_id"] + 1
    assert "Some texts differ" in page(proof)
