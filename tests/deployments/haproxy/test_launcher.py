"""The program that mends Serve's configuration and becomes HAProxy."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions

from deployments.haproxy import launcher
from deployments.haproxy.launcher import ClientBounds, TemplateError, mend
from deployments.haproxy.variables import find_haproxy
from deployments.request_id import SAFE_ID

BOUNDS = ClientBounds(header_timeout_s=2.5, max_connections=7)


@pytest.fixture
def errors(tmp_path: Path) -> Path:
    folder = tmp_path / "errors"
    folder.mkdir()
    (folder / "503.http").write_bytes(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}")
    return folder


@pytest.fixture(params=[False, True], ids=["no application", "an application"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What this release of Ray writes."""
    path = tmp_path / "haproxy.cfg"
    settings = HAProxyConfig(
        socket_path=str(tmp_path / "admin.sock"),
        server_state_base=str(tmp_path),
        server_state_file=str(tmp_path / "state"),
        metrics_socket_path=str(tmp_path / "metrics.sock"),
        http_options=HTTPOptions(host="127.0.0.1", port=8000),
        is_head=True,
    )
    backends = {"http-default": BackendConfig(name="http-default", path_prefix="/")} if request.param else {}
    HAProxyApi(settings, backends, str(path))._generate_config_file_internal()
    return path


def test_nothing_listens_to_other_machines(config: Path, errors: Path) -> None:
    bound = [
        line.split()[1]
        for line in mend(config.read_text(), errors, BOUNDS).splitlines()
        if line.strip().startswith("bind")
    ]
    assert len(bound) == 3
    assert all(address.startswith("127.0.0.1:") for address in bound)


def test_the_error_files_replace_serves_own(config: Path, errors: Path) -> None:
    lines = [line.split() for line in mend(config.read_text(), errors, BOUNDS).splitlines() if "errorfile" in line]
    assert lines == [["errorfile", "503", str(errors / "503.http")]]


def test_without_an_application_the_answer_is_503(config: Path, errors: Path) -> None:
    mended = mend(config.read_text(), errors, BOUNDS)
    assert "return status 404" not in mended
    assert "backend default_backend\n    http-request deny deny_status 503\n" in mended
    assert f"    {launcher.NO_APPLICATION}\n" in mended


def test_request_ids_are_kept_by_the_rules_of_the_ingress(config: Path, errors: Path) -> None:
    frontend = mend(config.read_text(), errors, BOUNDS).partition("frontend http_frontend\n")[2].splitlines()
    start = len(BOUNDS.rules())
    lines = [line.strip() for line in frontend[start : start + len(launcher.REQUEST_IDS)]]
    assert lines == list(launcher.REQUEST_IDS)
    assert f"^{SAFE_ID}$" in "".join(launcher.REQUEST_IDS)


def test_headers_must_come_in_time(config: Path, errors: Path) -> None:
    assert "    timeout http-request 2500ms\n" in mend(config.read_text(), errors, BOUNDS)


def test_connections_of_one_address_are_counted_unless_any_number_is_allowed(config: Path, errors: Path) -> None:
    frontend = mend(config.read_text(), errors, BOUNDS).partition("frontend http_frontend\n")[2]
    assert "    tcp-request connection reject if { sc0_conn_cur gt 7 }\n" in frontend
    assert "conn_cur" not in mend(config.read_text(), errors, ClientBounds(2.5, None))


@pytest.mark.parametrize(
    "line", ["    bind :", "  bind *:", "errorfile ", "defaults\n", "http-request return status 404"]
)
def test_another_releases_configuration_is_refused(config: Path, errors: Path, line: str) -> None:
    with pytest.raises(TemplateError):
        mend(config.read_text().replace(line, "#"), errors, BOUNDS)


@pytest.mark.skipif(find_haproxy() is None, reason="no HAProxy on this machine")
def test_haproxy_takes_the_mended_configuration(config: Path, errors: Path) -> None:
    program = [sys.executable, "-IS", launcher.__file__, str(find_haproxy()), str(errors), json.dumps(asdict(BOUNDS))]
    command = [*program, "-f", str(config), "-c"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert result.returncode == 0, result.stderr
    assert "127.0.0.1:9101" in config.read_text()


def test_haproxy_ends_with_the_process_that_started_it(config: Path, errors: Path, tmp_path: Path) -> None:
    haproxy = tmp_path / "haproxy"
    haproxy.write_text("#!/bin/sh\necho $$\nexec sleep 60\n")
    haproxy.chmod(0o700)
    start = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    program = [sys.executable, "-IS", launcher.__file__, str(haproxy), str(errors), json.dumps(asdict(BOUNDS))]
    launch = [*program, "-f", str(config)]
    with subprocess.Popen([sys.executable, "-c", start, *launch], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([process], timeout=10)
    assert alive == []
