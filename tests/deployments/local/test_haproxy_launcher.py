"""The program that completes Serve's configuration and becomes HAProxy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions

from deployments.errors import error_body, headers_of, kind_of
from deployments.guard.middleware import SAFE_ID
from deployments.local import haproxy_launcher as launcher
from deployments.local.haproxy_launcher import ANSWER, complete
from deployments.local.haproxy_variables import find_haproxy
from engine.errors import CapacityError


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


def test_request_ids_are_kept_by_the_rules_of_the_ingress() -> None:
    assert f"^{SAFE_ID}$" in "".join(launcher.REQUEST_IDS)


@pytest.mark.parametrize("text", [text for text, _ in launcher.CHANGES])
def test_another_releases_configuration_is_refused(config: Path, text: str) -> None:
    with pytest.raises(ValueError, match="0 times instead of once"):
        complete(config.read_text().replace(text, "\n#"))


def test_its_own_answer_is_that_of_an_ingress_without_a_router() -> None:
    _, *lines = ANSWER.decode().partition("\r\n\r\n")[0].split("\r\n")
    kind = kind_of(CapacityError())
    headers = {"Content-Type": "application/json", "Content-Length": str(len(launcher.BODY)), **headers_of(kind)}
    assert lines == [*map(": ".join, headers.items())]
    assert json.loads(launcher.BODY) == error_body(kind, launcher.MESSAGE)


def launch(haproxy: str, config: Path) -> list[str]:
    return [sys.executable, "-IS", launcher.__file__, haproxy, "-f", str(config)]


@pytest.mark.skipif(find_haproxy() is None, reason="no HAProxy on this machine")
def test_haproxy_takes_the_configuration_and_answers_with_our_file(config: Path) -> None:
    command = [*launch(str(find_haproxy()), config), "-c"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "127.0.0.1:9101" in config.read_text()
    files = {line.split()[2] for line in config.read_text().splitlines() if "errorfile" in line}
    assert [Path(name).read_bytes() for name in files] == [ANSWER]
