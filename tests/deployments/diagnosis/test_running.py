import itertools
from collections import defaultdict

import httpx
import pytest

from deployments.diagnosis import running
from deployments.diagnosis.http_client import Client
from engine.control.judge import PROBLEMS
from tests.deployments.diagnosis.fake import FakePaceline


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(running.time, "perf_counter", lambda: float(next(ticks)))


ROUNDS = 'paceline:rounds_by_draft_length_total{num_draft_tokens="4",reason="goodput",replica="r1"}'
COMPILING = {"compiling": {"done": 1, "of": 6, "left_s": 40}}
OF_NO_USE = {'paceline:draft_problem{problem="low_acceptance"}': 1, 'paceline:draft_problem{problem="unused"}': 0}
LEARNED = {
    "paceline:draft_learning_tokens_total": 64_000,
    'paceline:draft_learning_swaps_total{outcome="taken"}': 2,
    'paceline:draft_learning_accepted_tokens{weights="loaded"}': 1.5,
    'paceline:draft_learning_accepted_tokens{weights="learned"}': 2.1,
}
FINDINGS = [
    # Three tokens in the time of three rounds are as fast as plain, as the clock measures.
    ({"draft_s": 3.0}, {}, "speed-up", "ok", "measured speed-up 1.00, predicted 1.00; 3.00 tokens a round"),
    ({}, {}, "speed-up", "warning", "outside the rounds"),
    ({}, {}, "acceptance", "ok", "by position 100%, 100%"),
    ({}, {}, "drafts", "ok", "in 100%"),
    ({"length": "0", "reason": "off"}, {ROUNDS: 1e6}, "drafts", "warning", "speculation is off"),
    ({"length": "0"}, {ROUNDS: 1e6}, "drafts", "warning", "do not pay"),
    ({}, OF_NO_USE, "drafts", "warning", PROBLEMS["low_acceptance"]),
    ({}, {'paceline:drafter_fallbacks_total{reason="absent"}': 1e6}, "draft worker", "warning", "1000000 absent"),
    ({}, {}, "pace", "ok", "3 tokens/s without drafts"),
    ({"num_parameters": 5_500_000}, {}, "pace", "warning", "6 M weights allow 19: read"),
    ({"compiling": COMPILING}, {}, "pace", "warning", "measure once it is compiled, in 40 s"),
    ({}, {"paceline:target_recoveries_total": 2}, "recoveries", "warning", "the Router's log"),
    (
        {},
        LEARNED,
        "draft learning",
        "ok",
        "64,000 tokens learned, swaps: 2 taken; drafts of held-out texts add +40%",
    ),
    ({}, {"vllm:num_requests_waiting": 7}, "queue", "warning", "max_replicas"),
    ({"is_ready": False}, {}, "health", "error", "recovering"),
]
"""How a server is, what it has counted, and the subject, level and words of a finding."""


@pytest.mark.parametrize(("fields", "counted", "subject", "level", "words"), FINDINGS)
def test_a_server_is_judged(server: FakePaceline, fields, counted, subject, level, words):
    for name, value in fields.items():
        setattr(server, name, value)
    for name, value in counted.items():
        server.count(name, value)
    (finding,) = (finding for finding in running.server_findings(server.client) if finding.subject == subject)
    assert finding.level == level
    assert words in f"{finding.found}: {finding.advice}"


def test_tokens_of_the_first_chunk_are_not_timed(server: FakePaceline):
    rounds = defaultdict(float)
    figures = running._decode(server.client, rounds, "text", 1, True)
    running._decode(server.client, rounds, "text", 1, False)
    assert dict(rounds) == {("4", "goodput"): pytest.approx(32 / 3)}
    assert (figures.num_tokens, figures.seconds, figures.num_accepted) == (29, 10, pytest.approx(64 / 3))


def test_another_program_is_an_error():
    other = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    (finding,) = running.server_findings(Client("http://fake", transport=other))
    assert (finding.level, finding.subject) == ("error", "server")
