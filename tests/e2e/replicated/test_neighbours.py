"""Two servers on one machine do not know of each other; and a second signal to one of them."""

import signal
import time

import httpx
import psutil
import pytest

from deployments.cli.serve import SAME_SIGNAL_S
from deployments.local.haproxy_variables import find_haproxy
from tests.e2e.replicated.test_stopping import streaming

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore")]


def test_each_server_answers_its_own_clients(server, neighbour):
    models = [httpx.get(f"{asked.url}/v1/models", timeout=60).json()["data"][0]["id"] for asked in (server, neighbour)]
    assert models == ["tiny", "neighbour"]


@pytest.mark.skipif(find_haproxy() is None, reason="no HAProxy on this machine")
def test_nothing_of_haproxy_listens_to_other_machines(server, neighbour):
    for asked in (server, neighbour):
        processes = asked.processes("haproxy.cfg")
        connections = [connection for process in processes for connection in process.net_connections()]
        listening = [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
        assert len(listening) == 3
        assert {address.ip for address in listening} == {"127.0.0.1"}


def test_a_second_signal_does_not_wait_for_streams_and_the_end_of_one_server_is_not_that_of_the_other(
    server, neighbour
):
    with streaming(neighbour):
        neighbour.send(signal.SIGINT)
        while "stopping" not in neighbour.log.read_text():
            time.sleep(0.05)
        time.sleep(SAME_SIGNAL_S)
        neighbour.send(signal.SIGINT)
        assert neighbour.wait_until_gone() == 0
    assert "Traceback" not in neighbour.log.read_text()
    assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 200
