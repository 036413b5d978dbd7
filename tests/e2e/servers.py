"""Servers for tests: `python -m deployments` as a process, and Ray with Serve for an application of this process."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray import serve

from deployments.diagnosis.http_client import Client, Metrics
from tests.fakes import events_of

ROOT = Path(__file__).parents[2]
START_S = 180
STOP_S = 120


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def serve_on_ray(num_cpus: int, variables: Mapping[str, str], *, shows_log: bool = True) -> Iterator[str]:
    """Start Ray and Serve on a free port, and end them after the block; yield their URL.

    Args:
        num_cpus: logical ones, which may be more than there are.
        variables: environment variables for their processes.
        shows_log: whether this process writes what they log.
    """
    port = free_port()
    with pytest.MonkeyPatch.context() as environment:
        # Not Ray's `runtime_env`: with that, the workers that it starts in advance would be of no use.
        for name, value in {"PYTHONPATH": str(ROOT), **variables}.items():
            environment.setenv(name, value)
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=shows_log)
    try:
        serve.start(http_options={"port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def wait_until_ok(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a process answers a URL with 200; fail with its log if it ends or takes too long."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    pytest.fail(log.read_text())


def metrics(url: str) -> Metrics:
    """What /metrics says over a new connection."""
    return Client(url).metrics()


class Server:
    """A server process on a free port, and what it has written."""

    def __init__(self, log: Path, *settings: str, wrap: Callable[[list[str]], list[str]] = list) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [sys.executable, "-m", "deployments", "--port", str(port), "compile=off", *settings]
        with log.open("w") as output:
            # A session of its own: what is left of it can be found, and a terminal's signals do not reach it.
            self.process = subprocess.Popen(
                wrap(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        self._descendants: list[psutil.Process] = []

    def wait_until_ready(self) -> None:
        wait_until_ok(f"{self.url}/ready", self.process, self.log)
        self._descendants = psutil.Process(self.process.pid).children(recursive=True)

    def processes(self, title: str) -> list[psutil.Process]:
        """Its processes whose command line contains a title."""
        return descendants(title, self.process.pid)

    def logged(self, message: str) -> list[dict[str, Any]]:
        """The objects that contain a message, in a log of JSON.

        Processes that write at once may share a line; one that is only half written is left out.
        """
        found, decoder = [], json.JSONDecoder()
        for line in self.log.read_text().splitlines():
            while line.startswith("{") and message in line:
                try:
                    entry, end = decoder.raw_decode(line)
                except json.JSONDecodeError:
                    break
                if message in line[:end]:
                    found.append(entry)
                line = line[end:]
        return found

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


@contextlib.contextmanager
def serving(log: Path, *settings: str, wrap: Callable[[list[str]], list[str]] = list) -> Iterator[Server]:
    """Start a server, wait until it is ready, and leave nothing of it behind."""
    server = Server(log, *settings, wrap=wrap)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


async def stream_choices(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of all chunks of a completion that streams to its end."""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        chunks = events_of((await response.aread()).decode())
    assert all("error" not in chunk for chunk in chunks), chunks[-1]
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def stream_text(client: httpx.AsyncClient, seed: int, num_tokens: int) -> str:
    """The text of a completion of so many tokens."""
    body = {"prompt": "A", "max_tokens": num_tokens, "seed": seed, "ignore_eos": True}
    choices = await stream_choices(client, body)
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


def descendants(title: str, pid: int | None = None) -> list[psutil.Process]:
    """Return the processes below a process, by default this one, whose command line contains a title."""
    running = psutil.Process(pid).children(recursive=True)
    return [process for process in running if title in " ".join(_command_line(process))]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
