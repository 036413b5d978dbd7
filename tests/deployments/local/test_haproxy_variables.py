"""The variables with which Serve starts HAProxy."""

import logging
import os
import resource
from pathlib import Path

import pytest
from ray.serve._private import constants

from deployments.local import haproxy_variables as variables
from deployments.local.haproxy_variables import find_haproxy, haproxy_variables

NODE_ID_CHARS = 56
SOCKET_PATH_CHARS = 97

pytestmark = pytest.mark.skipif(find_haproxy() is None, reason="no HAProxy on this machine")


@pytest.fixture
def values() -> dict[str, str]:
    return haproxy_variables(longest_stream_s=300)


def test_serve_knows_each_variable(values: dict[str, str]) -> None:
    assert [name for name in values if not hasattr(constants, name)] == []


def test_two_servers_share_no_port_and_no_file(values: dict[str, str]) -> None:
    other = haproxy_variables(longest_stream_s=300)
    shared = {name for name, value in values.items() if other[name] == value}
    assert all(not name.endswith(("_PORT", "_PATH", "_LOC", "_BASE", "_FILE")) for name in shared)
    first, last = "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"
    assert int(values[last]) < int(other[first]) or int(other[last]) < int(values[first])


def test_a_server_that_finds_no_free_ports_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "PORTS", range(32_100, 32_200, 100))
    haproxy_variables(longest_stream_s=300)
    with pytest.raises(OSError, match="no free ports"):
        haproxy_variables(longest_stream_s=300)


def test_only_this_user_reaches_the_socket_that_commands_haproxy(values: dict[str, str]) -> None:
    folder = Path(values["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
    assert folder.stat().st_mode & 0o777 == 0o700


def test_socket_paths_are_short_enough(values: dict[str, str]) -> None:
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        assert len(values[name]) + 1 + NODE_ID_CHARS <= SOCKET_PATH_CHARS


@pytest.mark.parametrize(("limit", "connections"), [(20_000, 7_920), (2**20, 10_000), (resource.RLIM_INFINITY, 10_000)])
def test_connections_are_no_more_than_the_files_that_a_process_may_open(
    monkeypatch: pytest.MonkeyPatch, limit: int, connections: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, limit))
    values = haproxy_variables(longest_stream_s=300)
    assert values["RAY_SERVE_HAPROXY_MAXCONN"] == str(connections)


def test_without_haproxy_serves_own_proxy_is_used_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(variables, "find_haproxy", lambda: None)
    monkeypatch.setattr(variables, "logger", logging.getLogger("test"))
    assert haproxy_variables(longest_stream_s=300) == {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    assert "Serve's own proxy is used" in caplog.text


def test_a_program_that_does_not_run_here_is_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "haproxy"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(broken))
    assert os.access(broken, os.X_OK)
    assert find_haproxy() is None
