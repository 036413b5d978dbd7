"""One draft worker for two Routers: texts are those without drafts, also when it is killed or hangs under streams."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest

from deployments.diagnosis.http_client import Client
from tests.e2e.replicated.conftest import NUM_ROUTERS, PLAIN
from tests.e2e.servers import Server, metrics
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

NUM_TOKENS = 1500
"""Of streams that outlast the loss of a worker."""
REPLICA = "ServeReplica:default:Drafts"
BODIES = [
    {"prompt": prompt, "temperature": temperature, "seed": number, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    for number, (prompt, temperature) in enumerate(
        (p, t) for p in ("This PEP proposes", "def main(") for t in (0.0, 0.8)
    )
]


def samples(server: Server, name: str) -> dict[str, float]:
    """The samples of a metric, by replica; of several samples of a replica, the sum."""
    return {replica: value for (replica,), value in metrics(server.url).by(name, "replica").items()}


def is_leased(server: Server) -> bool:
    """Whether the one worker is leased by both Routers."""
    return [*samples(server, "paceline:draft_pool_leases").values()] == [NUM_ROUTERS]


def stream(server: Server, body: dict[str, Any], begin: Callable[[], None] = lambda: None) -> tuple[list[int], int]:
    """The tokens of a stream, and how many draft tokens it accepted; it fails if the stream ends with an error."""
    tokens: list[int] = []
    event: dict[str, Any] = {}
    options = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    speculative = body.get("speculative", {}) | {"metrics": "summary"}
    for event in Client(server.url).stream("/v1/completions", body | options | {"speculative": speculative}):
        tokens += [token_id for choice in event["choices"] for token_id in choice["token_ids"]]
        begin()
    return tokens, event["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[int]]:
    """The texts without drafts."""
    wait_until(lambda: is_leased(server))
    with ThreadPoolExecutor(len(BODIES)) as threads:
        return [tokens for tokens, _ in threads.map(lambda body: stream(server, body | PLAIN), BODIES)]


def test_one_worker_drafts_for_both_routers_and_changes_no_text(server, expected):
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    before = samples(server, accepted)
    with ThreadPoolExecutor(len(BODIES)) as threads:
        answers = list(threads.map(lambda body: stream(server, body), BODIES))
    assert [tokens for tokens, _ in answers] == expected
    assert all(num_accepted > NUM_TOKENS / 8 for _, num_accepted in answers)
    after = samples(server, accepted)
    assert len(after) == NUM_ROUTERS
    assert all(after[router] > before[router] for router in after)
    assert server.processes("DraftWorker") == []
    ((name, passes),) = samples(server, "paceline:draft_pool_passes_total").items()
    assert samples(server, "paceline:draft_pool_proposals_total")[name] >= passes > 0
    assert 0 <= samples(server, "paceline:draft_pool_utilisation")[name] <= 1


def kill(server: Server) -> None:
    assert httpx.post(f"{server.url}/demo/kill", json={"process": "draft"}, timeout=30).status_code == 202


def hang(server: Server) -> None:
    (worker,) = server.processes(REPLICA)
    worker.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize("strike", [pytest.param(kill, marks=pytest.mark.long), hang])
def test_texts_do_not_notice_the_loss_of_the_worker_and_drafts_come_back(strike, server, expected):
    wait_until(lambda: is_leased(server))
    (lost,) = samples(server, "paceline:draft_pool_leases")
    resubmitted, has_begun = metrics(server.url).total("paceline:resubmissions_total"), Event()
    with ThreadPoolExecutor(len(BODIES)) as threads:
        waiting = [threads.submit(stream, server, body, has_begun.set) for body in BODIES]
        assert has_begun.wait(60)
        strike(server)
        assert not all(answer.done() for answer in waiting)
        assert [answer.result()[0] for answer in waiting] == expected
    assert metrics(server.url).total("paceline:resubmissions_total") == resubmitted
    wait_until(lambda: is_leased(server) and lost not in samples(server, "paceline:draft_pool_leases"))
    tokens, num_accepted = stream(server, BODIES[0])
    assert tokens == expected[0]
    assert num_accepted > 0
