"""`make serve` is stopped: the server ends only after the streams that run, and nothing stays behind."""

import contextlib
import signal
import threading

import httpx
import psutil
import pytest

from deployments.local.haproxy_variables import find_haproxy
from tests.e2e.servers import STOP_S, Server

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


def refusal(server: Server) -> tuple[int, str, str, str]:
    headers = {"x-request-id": "refused"}
    while (response := httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60)).is_success:
        pass
    [request_id] = response.headers.get_list("x-request-id")
    return response.status_code, response.json()["error"]["code"], response.headers["retry-after"], request_id


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


def test_sigterm_lets_running_streams_finish_and_leaves_nothing_behind(server):
    """`timeout` signals make and the process group, make forwards both signals, and the streams finish nevertheless.

    Until then, every port of the server, of Ray and of Serve is bound to the loopback address.
    """
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

    assert open_to_others(server) == []
    reader = threading.Thread(target=read)
    reader.start()
    assert has_started.wait(STOP_S)
    before = server.log.read_text()
    server.send(signal.SIGTERM)
    if find_haproxy() is not None:
        assert refusal(server) == (503, "unavailable", "1", "refused")
    server.wait_until_gone()
    reader.join(STOP_S)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert any('"finish_reason":"length"' in line for line in lines)
    log = server.log.read_text()
    told_since = log.removeprefix(before)
    assert "Traceback" not in told_since
    assert "*** SIG" not in told_since
    assert "Error" not in "".join(line for line in log.splitlines() if line.startswith("make"))
    [access] = server.logged('"mine"')
    assert access["message"].startswith("POST /v1/completions 200")
    assert (access["deployment"], access["levelname"]) == ("default_Ingress", "INFO")
    for told in ("ready after", "KV blocks of", "serving target", "running streams may take 300 s to finish"):
        assert {line["levelname"] for line in server.logged(told)} == {"INFO"}
