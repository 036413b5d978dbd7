"""Only processes that hold each other's certificate can connect."""

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.transport.credentials import Credentials, make_credentials, tls_context


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Raise what either side raises; a TLS 1.3 client learns with its first read that it was refused."""
    here, there = socket.socketpair()

    def answer() -> None:
        with server.wrap_socket(there, server_side=True) as peer:
            peer.send(b"!")

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(answer)
        with client.wrap_socket(here) as peer:
            assert peer.version() == "TLSv1.3"
            peer.recv(1)
        done.result()


@pytest.fixture
def pair() -> tuple[Credentials, Credentials]:
    return make_credentials(), make_credentials()


def test_two_processes_that_know_each_other_connect(pair: tuple[Credentials, Credentials]) -> None:
    server, client = pair
    shake_hands(
        tls_context(server, client.certificate, is_server=True),
        tls_context(client, server.certificate, is_server=False),
    )


@pytest.mark.parametrize("unknown", ["server", "client"])
def test_an_unknown_certificate_is_refused(pair: tuple[Credentials, Credentials], unknown: str) -> None:
    """It has the same name as the expected one, but another key."""
    server, client = pair
    server_credentials = make_credentials() if unknown == "server" else server
    client_credentials = make_credentials() if unknown == "client" else client
    with pytest.raises(ssl.SSLError, match=r"(?i)verify failed|unknown ca|decrypt error"):
        shake_hands(
            tls_context(server_credentials, client.certificate, is_server=True),
            tls_context(client_credentials, server.certificate, is_server=False),
        )


def test_a_client_without_a_certificate_is_refused(pair: tuple[Credentials, Credentials]) -> None:
    server, client = pair
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname = False
    anonymous.load_verify_locations(cadata=server.certificate)
    with pytest.raises(ssl.SSLError):
        shake_hands(tls_context(server, client.certificate, is_server=True), anonymous)


def test_a_secret_key_is_not_printed() -> None:
    credentials = make_credentials()
    assert "PRIVATE KEY" in credentials.secret_key
    assert credentials.secret_key not in repr(credentials)
    assert "PRIVATE" not in repr(credentials)
