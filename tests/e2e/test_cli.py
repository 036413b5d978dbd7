"""`python -m deployments`: a signal ends the server only after the streams that run, and nothing stays behind.

One server is as `make serve` starts it, but for the format of its log; the others have a small model and no drafts.
"""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.haproxy.variables import find_haproxy
from tests.e2e.models import save_model
from tests.e2e.servers import STOP_S, Server

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return save_model(path, seed=1, layers=2, hidden=32, max_position_embeddings=32_768)


@contextlib.contextmanager
def serving(folder: Path, *settings: str) -> Iterator[Server]:
    server = Server(folder / "log.txt", *settings)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def streaming(server: Server) -> Iterator[Iterator[str]]:
    """Start a stream that lasts longer than the server; yields the lines after its first."""
    body = {"prompt": "This PEP", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=STOP_S) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def refusal(server: Server) -> tuple[int, str, str]:
    """Status, code and Retry-After of the first request that is refused."""
    while (response := httpx.get(f"{server.url}/v1/models")).is_success:
        pass
    return response.status_code, response.json()["error"]["code"], response.headers["retry-after"]


def open_to_others(server: Server) -> list[str]:
    """The ports that other machines reach, each with its process."""
    ports = []
    for process in [psutil.Process(server.process.pid), *server.processes("")]:
        with contextlib.suppress(psutil.NoSuchProcess):
            ports += [
                f"{connection.laddr.ip}:{connection.laddr.port} {' '.join(process.cmdline())[:80]}"
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
                and connection.laddr.ip not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")
            ]
    return ports


def test_sigterm_lets_running_streams_finish_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Until then, every port of the server, of Ray and of Serve is bound to the loopback address."""
    lines: list[str] = []
    has_started = threading.Event()

    def read() -> None:
        body = {"prompt": "This PEP", "max_tokens": 400, "ignore_eos": True, "stream": True}
        headers = {"x-request-id": "mine"}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=STOP_S
        ) as response:
            for line in response.iter_lines():
                lines.append(line)
                has_started.set()

    with serving(tmp_path, "log_format=json") as server:
        assert open_to_others(server) == []
        reader = threading.Thread(target=read)
        reader.start()
        assert has_started.wait(STOP_S)
        server.send(signal.SIGTERM)
        if find_haproxy() is not None:
            assert refusal(server) == (503, "unavailable", "1")
        assert server.wait_until_gone() == 0
        reader.join(STOP_S)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert any('"finish_reason":"length"' in line for line in lines)
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "*** SIG" not in log
    check_json([json.loads(line) for line in log.splitlines()])


def check_json(lines: list[dict[str, Any]]) -> None:
    """Look for lines of every process in a log."""
    [access] = [line for line in lines if line.get("request_id") == "mine"]
    assert access["message"].startswith("POST /v1/completions 200")
    assert (access["deployment"], access["levelname"]) == ("default_Ingress", "INFO")
    for told in ("ready after", "KV blocks of", "serving target", "running streams may take 300 s to finish"):
        [line] = [line for line in lines if told in line["message"]]
        assert line["levelname"] == "INFO"


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_that_says_why(model: str, tmp_path: Path) -> None:
    with serving(tmp_path, f"target_model={model}", "drafting=none", "drain_timeout_s=4") as server:
        with streaming(server) as lines:
            server.send(signal.SIGTERM)
            *_, error, done = [line for line in lines if line.startswith("data: ")]
        assert server.wait_until_gone() == 0
    assert done == "data: [DONE]"
    content = json.loads(error.removeprefix("data: "))["error"]
    assert content.pop("request_id")
    assert content == {
        "message": "the server is shutting down, and the 4 s to finish requests are over",
        "type": "server_error",
        "param": None,
        "code": "unavailable",
    }
    assert "*** SIG" not in server.log.read_text()


def test_a_second_signal_does_not_wait_for_streams(model: str, tmp_path: Path) -> None:
    with serving(tmp_path, f"target_model={model}", "drafting=none") as server, streaming(server):
        server.send(signal.SIGINT)
        while "stopping" not in server.log.read_text():
            time.sleep(0.05)
        server.send(signal.SIGINT)
        assert server.wait_until_gone() == 0
    assert "Traceback" not in server.log.read_text()
