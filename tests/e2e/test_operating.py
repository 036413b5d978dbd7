"""What operators see of two Routers and two Ingresses: health, metrics, request ids and logs as JSON."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from ray import serve

from deployments.builder import app
from deployments.config import AppConfig, Autoscaling
from deployments.environment import serve_environment
from deployments.haproxy.variables import find_haproxy
from tests.e2e.models import save_model
from tests.e2e.servers import serve_on_ray

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

BODY = {"prompt": "A", "max_tokens": 800, "ignore_eos": True, "temperature": 0.8, "seed": 3}
NUM_SCRAPES = 8
"""Over connections of their own, so that both Ingresses are asked."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = save_model(tmp_path_factory.mktemp("model"), seed=1, layers=2, hidden=32)
    config = AppConfig(
        target_model=model,
        draft_model="none",
        drafting="none",
        served_model_name="tiny",
        dtype="float32",
        compile="off",
        num_ingress_replicas=2,
        autoscaling=Autoscaling(min_replicas=2),
    )
    with serve_on_ray(3, serve_environment(config)) as url:
        serve.run(app(config))
        yield url


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def get(url: str, path: str) -> httpx.Response:
    """The answer over a new connection, of whatever status; while there is no server, the next one's."""
    return httpx.get(f"{url}{path}", timeout=30)


def all_know(url: str, num_routers: int) -> bool:
    """Whether every Ingress has heard of so many Routers."""
    answers = [get(url, "/health").json() for _ in range(NUM_SCRAPES)]
    return all(sum(router["ready"] for router in answer["routers"]) == num_routers for answer in answers)


def scrapes(url: str, name: str) -> list[dict[str, float]]:
    """The samples of a metric by replica, as several scrapes show them."""
    shown = []
    for _ in range(NUM_SCRAPES):
        response = get(url, "/metrics")
        assert response.status_code == 200
        samples = re.findall(rf'^{name}{{.*replica="(\w+)".*}} (\S+)$', response.text, re.MULTILINE)
        shown.append({replica: float(value) for replica, value in samples})
    return shown


def routers() -> list[int]:
    return [process.pid for process in psutil.process_iter(["cmdline"]) if _is_router(process)]


def _is_router(process: psutil.Process) -> bool:
    try:
        is_ours = psutil.Process(os.getpid()) in process.parents()
        return is_ours and "Replica:default:Router" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def logs(deployment: str) -> list[list[str]]:
    """The lines of each replica's log."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    return [path.read_text().splitlines() for path in folder.glob(f"replica_default_{deployment}*.log")]


def test_both_routers_are_ready_and_head_works(url: str) -> None:
    wait_for(lambda: all_know(url, 2))
    assert get(url, "/health").json()["status"] == "ok"
    for path in ("/live", "/ready", "/health"):
        response = httpx.head(f"{url}{path}")
        assert (response.status_code, response.content) == (200, b"")


def test_every_scrape_shows_both_routers(url: str) -> None:
    for _ in range(NUM_SCRAPES):
        assert httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 5}).status_code == 200
    shown = scrapes(url, "vllm:generation_tokens_total")
    assert all(sample == shown[0] for sample in shown)
    assert len(shown[0]) == 2
    assert sum(shown[0].values()) == 5 * NUM_SCRAPES
    assert [any("GET /metrics 200" in line for line in log) for log in logs("Ingress")] == [True, True]


@pytest.mark.parametrize("sent", ["mine-1", None, "x" * 200, "two words"])
def test_an_answer_has_one_request_id(url: str, sent: str | None) -> None:
    headers = {} if sent is None else {"x-request-id": sent}
    for path, status in (("/live", 200), ("/nowhere", 404)):
        response = httpx.get(f"{url}{path}", headers=headers)
        assert response.status_code == status
        [received] = response.headers.get_list("x-request-id")
        assert (received == sent) == (sent == "mine-1")
        assert re.fullmatch(r"[\w-]{1,64}", received)
        if status == 404:
            assert response.json()["error"]["request_id"] == received


def test_a_request_keeps_its_id_and_its_text_when_its_router_dies(url: str) -> None:
    text = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"]
    received = ""
    headers = {"x-request-id": "survivor"}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**BODY, "stream": True}, headers=headers, timeout=60
    ) as response:
        assert response.headers.get_list("x-request-id") == ["survivor"]
        for line in response.iter_lines():
            if line.startswith("data: {"):
                if not received:
                    # All of them: whichever has the stream.
                    for process in routers():
                        os.kill(process, signal.SIGKILL)
                received += json.loads(line[6:])["choices"][0]["text"]
    assert received == text
    [line] = [line for log in logs("Ingress") for line in log if "goes on at another Router" in line]
    assert "survivor" in line
    assert all(list(sample.values()) == [1.0] for sample in scrapes(url, "paceline:resubmissions_total"))


def test_metrics_and_liveness_outlast_all_routers(url: str) -> None:
    wait_for(lambda: all_know(url, 2))
    for process in routers():
        os.kill(process, signal.SIGKILL)
    wait_for(lambda: all_know(url, 0))
    health = get(url, "/health")
    assert get(url, "/ready").status_code == 503
    assert (health.status_code, health.json()["live"], health.json()["ready"]) == (503, True, False)
    assert health.headers["retry-after"]
    assert get(url, "/live").status_code == 200
    assert all(list(sample.values()) == [1.0] for sample in scrapes(url, "paceline:resubmissions_total"))
    wait_for(lambda: get(url, "/ready").status_code == 200)


@pytest.mark.skipif(find_haproxy() is None, reason="no HAProxy on this machine")
def test_haproxys_own_answers_have_an_id(url: str) -> None:
    serve.delete("default")
    response = httpx.get(f"{url}/ready", headers={"x-request-id": "mine"})
    assert response.status_code == 503
    assert response.headers.get_list("x-request-id") == ["mine"]
