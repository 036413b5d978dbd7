import itertools
from collections import defaultdict

import httpx
import pytest

from deployments.diagnosis import running
from deployments.diagnosis.finding import Finding
from deployments.diagnosis.http_client import Client
from engine.control.judge import PROBLEMS
from tests.deployments.diagnosis.fake import FakePaceline


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(running.time, "perf_counter", lambda: float(next(ticks)))


def found(server: FakePaceline) -> dict[str, Finding]:
    return {finding.subject: finding for finding in running.server_findings(server.client)}


def test_a_server_that_is_well(server: FakePaceline):
    server.draft_s = 3.0  # three tokens in the time of three rounds: as fast as plain, as the clock measures
    findings = found(server)
    assert [name for name, one in findings.items() if one.level != "ok"] == []
    assert "measured speed-up 1.00, predicted 1.00; 3.00 tokens a round" in findings["speed-up"].found
    assert findings["acceptance"].found == "by position 100%, 100%"
    assert findings["drafts"].found.startswith("in 100%")


def test_tokens_of_the_first_chunk_are_not_timed(server: FakePaceline):
    rounds = defaultdict(float)
    figures = running._decode(server.client, rounds, "text", 1, True)
    running._decode(server.client, rounds, "text", 1, False)
    assert dict(rounds) == {("4", "goodput"): pytest.approx(32 / 3)}
    assert (figures.num_tokens, figures.seconds, figures.num_accepted) == (29, 10, pytest.approx(64 / 3))


def test_a_speed_up_that_clients_do_not_get_is_a_warning(server: FakePaceline):
    assert found(server)["speed-up"].level == "warning"


def test_a_pace_far_below_what_the_weights_allow_is_a_warning_and_eager_passes_are_named(server: FakePaceline):
    pace = found(server)["pace"]
    assert (pace.level, pace.found) == ("ok", "3 tokens/s without drafts")
    server.num_parameters = 5_500_000
    pace = found(server)["pace"]
    assert (pace.level, pace.advice[:26]) == ("warning", "6 M weights allow 19: read")
    server.num_parameters, server.compiling = 10**9, {"compiling": {"done": 1, "of": 6, "left_s": 40}}
    pace = found(server)["pace"]
    assert (pace.level, pace.advice) == ("warning", "measure once it is compiled, in 40 s")
    server.num_parameters = None
    assert found(server).keys() & {"pace", "speed-up"} == {"speed-up"}


@pytest.mark.parametrize(("reason", "why"), [("off", "speculation is off"), ("goodput", "do not pay")])
def test_unused_drafts_are_explained(server: FakePaceline, reason, why):
    server.count('paceline:rounds_by_draft_length_total{num_draft_tokens="4",reason="goodput",replica="r1"}', 1e6)
    server.length, server.reason = "0", reason
    drafts = found(server)["drafts"]
    assert (drafts.level, why in drafts.advice) == ("warning", True)


def test_recoveries_a_queue_rejections_and_lost_drafts_are_warnings(server: FakePaceline):
    server.count("paceline:target_recoveries_total", 2)
    server.count("vllm:num_requests_waiting", 7)
    server.count('paceline:draft_problem{problem="low_acceptance"}', 1)
    server.count('paceline:draft_problem{problem="unused"}', 0)
    server.count('paceline:drafter_fallbacks_total{reason="absent"}', 1e6)
    findings = found(server)
    assert {name for name, one in findings.items() if one.level != "ok"} >= {"recoveries", "queue", "drafts"}
    assert findings["drafts"].advice == PROBLEMS["low_acceptance"]
    assert findings["draft worker"].found == "rounds without its answer: 1000000 absent"


def test_a_server_that_is_not_ready_or_another_program_is_an_error(server: FakePaceline):
    server.is_ready = False
    assert found(server)["health"].level == "error"
    other = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    (finding,) = running.server_findings(Client("http://fake", transport=other))
    assert (finding.level, finding.subject) == ("error", "server")
