"""What operators see of two Routers and two Ingresses: health, metrics, request ids and logs as JSON."""

import json

import httpx
import pytest

from tests.e2e.replicated.conftest import PLAIN
from tests.e2e.servers import metrics
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

BODY = {"prompt": "A", "max_tokens": 800, "ignore_eos": True, "temperature": 0.8, "seed": 3, **PLAIN}
NUM_SCRAPES = 8
"""Over connections of their own, so that both Ingresses are asked."""


def get(url: str, path: str, request_id: str = "") -> httpx.Response:
    """The answer over a new connection, of whatever status; while there is no server, the next one's."""
    return httpx.get(f"{url}{path}", headers={"x-request-id": request_id} if request_id else {}, timeout=30)


def all_know(url: str, num_routers: int) -> bool:
    """Whether every Ingress has heard of so many Routers."""
    answers = [get(url, "/health").json() for _ in range(NUM_SCRAPES)]
    return all(sum(router["ready"] for router in answer["routers"]) == num_routers for answer in answers)


def agreed(url: str, name: str) -> float:
    """The sum of a metric over two Routers, once every scrape shows the same samples."""
    while True:
        first, *others = [metrics(url).by(name, "replica") for _ in range(NUM_SCRAPES)]
        if len(first) == 2 and all(other == first for other in others):
            return sum(first.values())


def resubmissions(url: str) -> list[float]:
    """The requests that went on at another Router because theirs was lost, as several scrapes show them."""
    shown = [metrics(url).by("paceline:resubmissions_total", "reason") for _ in range(NUM_SCRAPES)]
    return [sum(count for (reason,), count in reasons.items() if reason != "moved") for reasons in shown]


def test_both_routers_and_ingresses_are_ready_and_head_works(server, url):
    wait_until(lambda: all_know(url, 2))
    assert get(url, "/health").json()["status"] == "ok"
    for path in ("/live", "/ready", "/health"):
        response = httpx.head(f"{url}{path}", timeout=30)
        assert (response.status_code, response.content) == (200, b"")


def test_every_answer_of_either_ingress_is_in_the_log(server, url):
    sent = {f"logged-{i}" for i in range(20)}
    for request_id in sent:
        assert get(url, "/health", request_id).status_code == 200
    wait_until(lambda: {line["request_id"] for line in server.logged("GET /health")} >= sent)
    assert len({line["replica"] for line in server.logged("GET /health")}) == 2


def test_every_scrape_shows_both_routers(server, url):
    before = agreed(url, "vllm:generation_tokens_total")
    for _ in range(NUM_SCRAPES):
        assert httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 5}, timeout=60).status_code == 200
    wait_until(lambda: agreed(url, "vllm:generation_tokens_total") == before + 5 * NUM_SCRAPES)


def check_that_nothing_but_readiness_is_lost(url: str) -> None:
    wait_until(lambda: all_know(url, 0))
    health = get(url, "/health")
    assert get(url, "/ready").status_code == 503
    assert (health.status_code, health.json()["live"], health.json()["ready"]) == (503, True, False)
    assert health.headers["retry-after"]
    assert get(url, "/live").status_code == 200


def test_a_request_keeps_its_id_and_its_text_and_the_service_its_metrics_when_all_routers_die(server, url):
    wait_until(lambda: all_know(url, 2))
    text = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"]
    before = resubmissions(url)
    received, is_first = "", True
    headers = {"x-request-id": "survivor"}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**BODY, "stream": True}, headers=headers, timeout=60
    ) as response:
        assert response.headers.get_list("x-request-id") == ["survivor"]
        for line in response.iter_lines():
            if line.startswith("data: {"):
                if is_first:
                    for process in server.processes("Replica:default:Router"):  # whichever has the stream
                        process.kill()
                    check_that_nothing_but_readiness_is_lost(url)
                is_first = False
                received += json.loads(line[6:])["choices"][0]["text"]
    assert received == text
    # Twice, if it had resumed at the second Router before that was killed, too.
    assert "survivor" in {line["request_id"] for line in server.logged("resumes at another Router")}
    [after] = set(resubmissions(url))
    assert after > before[0]
    wait_until(lambda: get(url, "/ready").status_code == 200)
