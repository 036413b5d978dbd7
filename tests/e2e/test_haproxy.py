"""Two servers on one machine behind HAProxy: what clients see of abuse, and when processes are killed.

The second server, which only has to be there, has a small model and no drafts.
"""

import signal
import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from deployments.haproxy.variables import find_haproxy
from tests.bench import abuse
from tests.bench.abuse import ABUSES, HEAVY, outcomes
from tests.e2e.models import save_model
from tests.e2e.servers import STOP_S, Server

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_haproxy() is None, reason="no HAProxy on this machine"),
]

NAMES = ("one", "two")
HEADER_TIMEOUT_S = 2
BODY_TIMEOUT_S = 4
MAX_CONNECTIONS = 60
LIMITS = (
    f'limits={{"header_timeout_s": {HEADER_TIMEOUT_S}, "body_timeout_s": {BODY_TIMEOUT_S}, '
    f'"max_connections_per_address": {MAX_CONNECTIONS}}}'
)
QUIET_S = 2.0
EACH_S = 1.5
TRIES = 3
"""Other programs hold clients up as well, but not three times in a row."""
BODY = {"prompt": "This PEP", "max_tokens": 600, "ignore_eos": True, "temperature": 0.7, "seed": 3}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("logs")
    small = (f"target_model={save_model(folder / 'model', seed=1, layers=2, hidden=32)}", "drafting=none")
    servers: list[Server] = []
    try:
        for name, settings in zip(NAMES, ((), small), strict=True):
            servers.append(Server(folder / name, f"served_model_name={name}", LIMITS, *settings))
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.kill()


def model(server: Server) -> str:
    return httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"]


def test_each_server_answers_its_own_clients(servers: list[Server]) -> None:
    assert [model(server) for server in servers] == list(NAMES)


def test_nothing_of_haproxy_listens_to_other_machines(servers: list[Server]) -> None:
    for server in servers:
        processes = server.processes("haproxy.cfg")
        connections = [connection for process in processes for connection in process.net_connections()]
        listening = [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
        assert len(listening) == 3
        assert {address.ip for address in listening} == {"127.0.0.1"}


def test_costly_bodies_hold_nobody_up(servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abuse, "QUIET_S", QUIET_S)
    names, failures = [name for name in ABUSES if name not in HEAVY], [""]
    for _ in range(TRIES):
        rows = [(row.name, row.failures(ABUSES[row.name].statuses)) for row in outcomes(servers[0].url, names, EACH_S)]
        names = [name for name, problems in rows if problems]
        failures = [problem for _, problems in rows for problem in problems]
        if not names:
            break
    assert failures == []


def connect(server: Server) -> socket.socket:
    """Return a new connection.

    Raises:
        ConnectionResetError: it was closed at once.
    """
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


def test_connections_that_trickle_are_closed(servers: list[Server]) -> None:
    connections = [connect(servers[0]) for _ in range(40)]
    for number, connection in enumerate(connections):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + (b"X-Slow: " if number % 2 else b"Content-Length: 1000000\r\n\r\n"))
    answers = trickle(connections, BODY_TIMEOUT_S + 6)
    for connection in connections:
        connection.close()
    assert None not in answers
    assert {(answer or b"")[:12] for answer in answers[0::2]} == {b"HTTP/1.1 408"}
    assert all(b"the body took longer than 4 s" in (answer or b"") for answer in answers[0::2])
    assert {(answer or b"")[:12] for answer in answers[1::2]} <= {b"", b"HTTP/1.1 408"}


def test_one_address_has_a_bound_of_connections(servers: list[Server]) -> None:
    connections, num_closed = [], 0
    for _ in range(MAX_CONNECTIONS + 10):
        try:
            connections.append(connect(servers[0]))
            connections[-1].settimeout(0.01)
            num_closed += connections[-1].recv(1) == b""
        except TimeoutError:
            pass
        except ConnectionResetError:
            num_closed += 1
    for connection in connections:
        connection.close()
    assert num_closed == 10
    servers[0].wait_until_ready()


def stream_and_kill(server: Server, title: str) -> None:
    """Read a stream to its end, and kill the processes with a title at its first line."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**BODY, "stream": True}, timeout=60) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number == 0:
                for process in server.processes(title):
                    process.kill()


def test_a_killed_ingress_cuts_its_streams_and_refuses_nobody(servers: list[Server]) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        stream_and_kill(servers[0], "Replica:default:Ingress")
    assert model(servers[0]) == NAMES[0]


def test_a_killed_haproxy_cuts_its_streams_and_the_same_request_gives_the_same_text(servers: list[Server]) -> None:
    url = f"{servers[0].url}/v1/completions"
    text = httpx.post(url, json=BODY, timeout=60).json()["choices"][0]["text"]
    with pytest.raises(httpx.RemoteProtocolError):
        stream_and_kill(servers[0], "haproxy.cfg")
    servers[0].wait_until_ready()
    assert httpx.post(url, json=BODY, timeout=60).json()["choices"][0]["text"] == text


def test_the_end_of_one_server_is_not_the_end_of_the_other(servers: list[Server]) -> None:
    servers[0].send(signal.SIGTERM)
    assert servers[0].process.wait(STOP_S) == 0
    assert model(servers[1]) == NAMES[1]
    servers[1].send(signal.SIGTERM)
    assert servers[1].process.wait(STOP_S) == 0
