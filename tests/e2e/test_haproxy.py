"""Two servers on one machine behind HAProxy, and what their clients see when processes are killed."""

import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from deployments.haproxy.variables import find_haproxy
from tests.e2e.servers import STOP_S, Server

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_haproxy() is None, reason="no HAProxy on this machine"),
]

NAMES = ("one", "two")
BODY = {"prompt": "This PEP", "max_tokens": 600, "ignore_eos": True, "temperature": 0.7, "seed": 3}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("logs")
    servers: list[Server] = []
    try:
        for name in NAMES:
            servers.append(Server(folder / name, f"served_model_name={name}"))
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
