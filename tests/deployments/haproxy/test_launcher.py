"""The program that mends Serve's configuration and becomes HAProxy."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions

from deployments.haproxy import launcher
from deployments.haproxy.launcher import TemplateError, mend
from deployments.haproxy.variables import find_haproxy
from deployments.request_id import SAFE_ID


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
        line.split()[1] for line in mend(config.read_text(), errors).splitlines() if line.strip().startswith("bind")
    ]
    assert len(bound) == 3
    assert all(address.startswith("127.0.0.1:") for address in bound)


def test_the_error_files_replace_serves_own(config: Path, errors: Path) -> None:
    lines = [line.split() for line in mend(config.read_text(), errors).splitlines() if "errorfile" in line]
    assert lines == [["errorfile", "503", str(errors / "503.http")]]


def test_without_an_application_the_answer_is_503(config: Path, errors: Path) -> None:
    mended = mend(config.read_text(), errors)
    assert "return status 404" not in mended
    assert "backend default_backend\n    http-request deny deny_status 503\n" in mended
    assert f"    {launcher.NO_APPLICATION}\n" in mended


def test_request_ids_are_kept_by_the_rules_of_the_ingress(config: Path, errors: Path) -> None:
    frontend = mend(config.read_text(), errors).partition("frontend http_frontend\n")[2].splitlines()
    assert [line.strip() for line in frontend[: len(launcher.REQUEST_IDS)]] == list(launcher.REQUEST_IDS)
    assert f"^{SAFE_ID}$" in "".join(launcher.REQUEST_IDS)


def test_headers_must_come_in_time(config: Path, errors: Path) -> None:
    assert f"timeout http-request {launcher.HEADERS_TIMEOUT_S}s" in mend(config.read_text(), errors)


@pytest.mark.parametrize(
    "line", ["    bind :", "  bind *:", "errorfile ", "defaults\n", "http-request return status 404"]
)
def test_another_releases_configuration_is_refused(config: Path, errors: Path, line: str) -> None:
    with pytest.raises(TemplateError):
        mend(config.read_text().replace(line, "#"), errors)


@pytest.mark.skipif(find_haproxy() is None, reason="no HAProxy on this machine")
def test_haproxy_takes_the_mended_configuration(config: Path, errors: Path) -> None:
    command = [sys.executable, "-IS", launcher.__file__, str(find_haproxy()), str(errors), "-f", str(config), "-c"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert result.returncode == 0, result.stderr
    assert "127.0.0.1:9101" in config.read_text()


def test_haproxy_ends_with_the_process_that_started_it(config: Path, errors: Path, tmp_path: Path) -> None:
    haproxy = tmp_path / "haproxy"
    haproxy.write_text("#!/bin/sh\necho $$\nexec sleep 60\n")
    haproxy.chmod(0o700)
    start = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    launch = [sys.executable, "-IS", launcher.__file__, str(haproxy), str(errors), "-f", str(config)]
    with subprocess.Popen([sys.executable, "-c", start, *launch], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([process], timeout=10)
    assert alive == []
