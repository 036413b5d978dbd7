"""Only processes that hold each other's certificate can connect; test_link.py tries unknown certificates."""

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.transport.credentials import make_credentials, tls_context


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


def test_a_client_must_present_its_certificate() -> None:
    server, client = make_credentials(), make_credentials()
    context = tls_context(server, client.certificate, is_server=True)
    shake_hands(context, tls_context(client, server.certificate, is_server=False))
    with pytest.raises(ssl.SSLError):
        shake_hands(context, tls_context(make_credentials(), server.certificate, is_server=False))


def test_a_secret_key_is_not_printed() -> None:
    credentials = make_credentials()
    assert "PRIVATE KEY" in credentials.secret_key
    assert "PRIVATE" not in repr(credentials)
