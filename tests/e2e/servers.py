"""`python -m deployments` as a process."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

ROOT = Path(__file__).parents[2]
START_S = 180
STOP_S = 120


class Server:
    """A server process on a free port, and what it has written."""

    def __init__(self, log: Path, *settings: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [sys.executable, "-m", "deployments", "--port", str(port), "compile=off", *settings]
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

    def processes(self, title: str) -> list[psutil.Process]:
        """Its processes whose command line contains a title."""
        running = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in running if title in " ".join(_command_line(process))]

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


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
