"""What travels through Ray, and the options of a connection between nodes."""

import json
import pickle
import socket

from cluster.transport.endpoint import Endpoint, set_tcp_options

ENDPOINT = Endpoint("node 1", "/tmp/worker.sock", "10.0.0.1", 1234, "a certificate")


def test_an_endpoint_survives_serialization() -> None:
    assert pickle.loads(pickle.dumps(ENDPOINT)) == ENDPOINT
    assert Endpoint(*json.loads(json.dumps(ENDPOINT))) == ENDPOINT


def test_a_tcp_connection_sends_at_once_and_notices_that_its_peer_has_vanished() -> None:
    with socket.socket() as connection:
        set_tcp_options(connection)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle + interval * count <= 30
