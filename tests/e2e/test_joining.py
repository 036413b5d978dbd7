"""Joining a cluster that `ray start` has started, as docs/serve.md describes, with and without a token."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.e2e.servers import ROOT, free_port, wait_until_ok
from tests.fakes import data_of
from tests.models import save_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

BIN = Path(sys.executable).parent
START_S = 120
LONG_TOKENS = 30_000
"""Of a stream that still runs when a command has been carried out."""


class Head:
    """A head node that `ray start` started, and the environment of those who know its token."""

    def __init__(self, folder: Path, auth_mode: str) -> None:
        self.gcs, self.dashboard, self.http = (free_port() for _ in range(3))
        self.log = folder / "ray.log"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": auth_mode,
        }
        if auth_mode == "token":
            self.environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Its own, because Ray notes the last cluster's address there; short, because a socket's path has 107 characters
        # at most.
        self.folder = Path("/tmp") / f"ray-{secrets.token_hex(4)}"
        command = [
            *(str(BIN / "ray"), "start", "--head", "--block", "--num-cpus", "2", "--disable-usage-stats"),
            *("--port", str(self.gcs), "--dashboard-port", str(self.dashboard), "--temp-dir", str(self.folder)),
            *("--ray-client-server-port", str(free_port()), "--dashboard-agent-listen-port", str(free_port())),
            *("--object-store-memory", str(80 * 2**20)),
        ]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, env=self.environment, stdout=output, stderr=subprocess.STDOUT)

    @property
    def gcs_address(self) -> str:
        return f"127.0.0.1:{self.gcs}"

    @property
    def dashboard_address(self) -> str:
        return f"http://127.0.0.1:{self.dashboard}"

    def without_mode(self) -> dict[str, str]:
        """Return the environment of somebody who has the token and does not say that the cluster needs it."""
        return {name: value for name, value in self.environment.items() if name != "RAY_AUTH_MODE"}

    def run(self, *command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            env=environment or self.environment,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
            cwd=self.folder,
        )

    def stop(self) -> None:
        processes = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        self.process.wait(60)
        _, alive = psutil.wait_procs(processes, timeout=20)
        for process in alive:
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module", params=["token", "disabled"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    head = Head(tmp_path_factory.mktemp("head"), request.param)
    try:
        wait_until_ok(f"{head.dashboard_address}/api/gcs_healthz", head.process, head.log)
        yield head
    finally:
        head.stop()


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("model")
    model = save_model(folder, seed=1, layers=1, hidden=16, max_position_embeddings=2 * LONG_TOKENS)
    settings = {"target_model": model, "draft_model": "none", "served_model_name": "tiny", "compile": "off"}
    return settings | {"num_blocks": "4000"}


def wait_for_answer(head: Head, url: str) -> None:
    deadline = time.monotonic() + START_S
    answer: object = None
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                body = {"model": "tiny", "prompt": "A", "max_tokens": 4}
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
                assert answer.status_code == 200, answer.text
                return
        except httpx.HTTPError as error:
            answer = error
        time.sleep(0.5)
    pytest.fail(f"{answer}\n{head.run('serve', 'status', '--address', head.dashboard_address)}")


def deploy_nothing(head: Head, config: Path) -> None:
    """Deploy no application while a stream runs: that finishes, and new requests are refused."""
    body = {"prompt": "A", "max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
    url = f"http://127.0.0.1:{head.http}"
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=START_S) as response:
        lines = response.iter_lines()
        next(lines)
        config.write_text(yaml.safe_dump({"http_options": {"port": head.http}, "applications": []}))
        deployed = head.run("serve", "deploy", str(config), "--address", head.dashboard_address)
        assert deployed.returncode == 0, deployed.stderr
        while (status := httpx.get(f"{url}/live", timeout=60).status_code) == 200:
            time.sleep(0.1)
        assert status in (404, 503)  # Serve's own proxy answers 404
        *_, last = data_of(lines)
    assert '"finish_reason":"length"' in last


def test_serve_deploy_joins_and_leaves_without_cutting_a_stream(head, arguments, tmp_path):
    config = tmp_path / "config.yaml"
    application = {"name": "default", "import_path": "deployments:app", "args": arguments}
    options = {"http_options": {"port": head.http}, "applications": [application]}
    config.write_text(yaml.safe_dump(options))
    command = ("serve", "deploy", str(config), "--address", head.dashboard_address)
    if head.environment["RAY_AUTH_MODE"] == "token":
        refused = head.run(*command, environment=head.without_mode())
        assert refused.returncode != 0
        assert "Authentication" in refused.stderr + refused.stdout
    deployed = head.run(*command)
    assert deployed.returncode == 0, deployed.stderr
    wait_for_answer(head, f"http://127.0.0.1:{head.http}")
    deploy_nothing(head, config)
    ended = head.run("serve", "shutdown", "--yes", "--address", head.dashboard_address)
    assert ended.returncode == 0, ended.stderr


def test_serve_run_joins(head, arguments):
    started = head.run("serve", "start", "--address", head.gcs_address, "--http-port", str(head.http))
    assert started.returncode == 0, started.stderr
    settings = [f"{name}={value}" for name, value in arguments.items()]
    command = [str(BIN / "serve"), "run", "--address", head.gcs_address, "deployments:app", *settings]
    with subprocess.Popen(command, env=head.environment, cwd=head.folder) as process:
        try:
            wait_for_answer(head, f"http://127.0.0.1:{head.http}")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
