"""`python -m deployments`: a signal ends the server only after the streams that run, and nothing stays behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
START_S = 180
STOP_S = 120


class Server:
    """A server process on a free port, and what it has written."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [sys.executable, "-m", "deployments", "--port", str(port), "compile=off"]
        with log.open("w") as output:
            # A session of its own: what is left of it can be found, and a terminal's signals do not reach it.
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        self._descendants: list[psutil.Process] = []

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    self._descendants = psutil.Process(self.process.pid).children(recursive=True)
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        pytest.fail(self.log.read_text())

    def send(self, signal_number: int) -> None:
        self.process.send_signal(signal_number)

    def wait_until_gone(self) -> int:
        """The exit status, when no process of the server is left."""
        status = self.process.wait(STOP_S)
        _, alive = psutil.wait_procs(self._descendants, timeout=30)
        assert alive == []
        return status

    def kill(self) -> None:
        for process in self._descendants:
            if process.is_running():
                process.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "log.txt")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def test_sigterm_lets_running_streams_finish_and_leaves_nothing_behind(server: Server) -> None:
    body = {"prompt": "This PEP", "max_tokens": 400, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    has_started = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=STOP_S) as response:
            for line in response.iter_lines():
                lines.append(line)
                has_started.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert has_started.wait(STOP_S)
    server.send(signal.SIGTERM)
    assert server.wait_until_gone() == 0
    reader.join(STOP_S)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert any('"finish_reason":"length"' in line for line in lines)
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "*** SIG" not in log


def test_a_second_signal_does_not_wait_for_streams(server: Server) -> None:
    body = {"prompt": "This PEP", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=STOP_S) as response:
        lines = response.iter_lines()
        next(lines)
        server.send(signal.SIGINT)
        while "stopping" not in server.log.read_text():
            time.sleep(0.05)
        server.send(signal.SIGINT)
        assert server.wait_until_gone() == 0
    assert "Traceback" not in server.log.read_text()
