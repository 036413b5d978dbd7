"""What clients see of HAProxy: abuse, connections that trickle or are too many, and processes that are killed."""

import json
import socket
import time

import pytest

from deployments.local.haproxy_launcher import HEADER_TIMEOUT_S
from deployments.local.haproxy_variables import find_haproxy
from tests.bench import abuse
from tests.bench.abuse import ABUSES, HEAVY, outcomes
from tests.e2e.servers import Server, metrics
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_haproxy() is None, reason="no HAProxy on this machine"),
]

COSTLY = ["a million empty prompts", "90,000 valid messages", "1,000 valid messages"]
"""A body that is counted, another that is parsed, and a conversation that is rendered and tokenized."""
OTHERS = [name for name in ABUSES if name not in (*COSTLY, *HEAVY)]
QUIET_S = 1.5
EACH_S = 1.5
TRIES = 3
"""Other programs hold clients up as well, but not three times in a row."""
BODY = {"prompt": "This PEP", "max_tokens": 600, "ignore_eos": True, "temperature": 0.7, "seed": 3}


@pytest.mark.parametrize("names", [COSTLY, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["three", "others"])
def test_costly_bodies_hold_nobody_up(server, monkeypatch, names):
    monkeypatch.setattr(abuse, "QUIET_S", QUIET_S)
    failures = [""]
    for _ in range(TRIES):
        rows = list(outcomes(server.url, names, EACH_S))
        names = [row.name for row in rows if row.failures]
        failures = [problem for row in rows for problem in row.failures]
        if not names:
            break
    assert failures == []


def connect(server: Server) -> socket.socket:
    """Return a new connection. Raises ConnectionResetError if it was closed at once."""
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def trickle(connections: list[socket.socket], duration_s: float) -> list[bytes | None]:
    """Send a letter on each connection every half a second; return what came back, None where it is still open."""
    deadline = time.monotonic() + duration_s
    answers: list[bytes | None] = [None] * len(connections)
    while None in answers and time.monotonic() < deadline:
        time.sleep(0.5)
        for number, connection in enumerate(connections):
            if answers[number] is None:
                connection.settimeout(0.001)
                try:
                    connection.sendall(b"x")
                    answers[number] = connection.recv(4096)
                except TimeoutError:
                    pass
                except OSError:
                    answers[number] = b""
    return answers


def test_connections_that_trickle_are_closed(server):
    connections = [connect(server) for _ in range(40)]
    for connection in connections:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    answers = trickle(connections, HEADER_TIMEOUT_S + 6)
    for connection in connections:
        connection.close()
    assert None not in answers
    assert {(answer or b"")[:12] for answer in answers} <= {b"", b"HTTP/1.1 408"}


def running(server: Server) -> float:
    return metrics(server.url).total("vllm:num_requests_running")


def test_an_answer_in_one_piece_ends_with_its_client_whose_body_came_late(server):
    """HAProxy that splices does not notice that such a client has left, and takes most of a core meanwhile."""
    body = json.dumps({**BODY, "max_tokens": 2000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connections = [connect(server) for _ in range(4)]
    for connection in connections:
        connection.sendall(f"{head}\r\n\r\n".encode())
    time.sleep(0.02)
    for connection in connections:
        connection.sendall(body)
    wait_until(lambda: running(server) == len(connections), 30)
    for connection in connections:
        connection.close()
    wait_until(lambda: running(server) == 0, 5)
    processes = server.processes("haproxy.cfg")
    used_s = -sum(sum(process.cpu_times()[:2]) for process in processes)
    time.sleep(1)
    used_s += sum(sum(process.cpu_times()[:2]) for process in processes)
    assert used_s < 0.4
