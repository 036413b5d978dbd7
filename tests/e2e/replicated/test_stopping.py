"""A stream that outlasts the end of its server."""

import contextlib
import json
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.replicated.conftest import DRAIN_TIMEOUT_S, PLAIN
from tests.e2e.servers import STOP_S, Server
from tests.fakes import data_of

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


@contextlib.contextmanager
def streaming(server: Server) -> Iterator[Iterator[str]]:
    """Start a stream that lasts longer than the server; yields the lines after its first."""
    body = {"prompt": "This PEP", "max_tokens": 30_000, "ignore_eos": True, "stream": True, **PLAIN}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=STOP_S) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_that_says_why(server):
    with streaming(server) as lines:
        server.send(signal.SIGTERM)
        *_, error = data_of(lines)
    assert server.wait_until_gone() == 0
    content = json.loads(error)["error"]
    assert content.pop("request_id")
    assert content == {
        "message": f"the server is shutting down, and the {DRAIN_TIMEOUT_S} s to finish requests are over",
        "type": "server_error",
        "param": None,
        "code": "unavailable",
    }
    assert "*** SIG" not in server.log.read_text()
