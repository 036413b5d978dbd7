"""Paceline as it is served: the application on a Ray cluster of its own, asked over HTTP by streaming clients."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from deployments.config import AppConfig
from deployments.diagnosis.http_client import Metrics
from deployments.local.environment import serve_environment
from tests.bench.contestants.processes import freeze, thaw
from tests.bench.contestants.readings import acceptance_of, split_between
from tests.bench.figures import Batch
from tests.bench.workload import Arm, Cell, Workload
from tests.e2e.servers import free_port, wait_until_ok
from tests.load.client import data_of_events

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "RAY_ADDRESS": "local",  # a cluster of its own, whatever else runs on this machine
    "RAY_USAGE_STATS_ENABLED": "0",
}
STOP_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 120.0
FIRST_SETTLE_S = 2.0
"""After the first answer: caches of the processes fill."""
SETTLE_S = 0.5
"""After a thaw, what has become due meanwhile is done first."""


class Server:
    """`serve run` of the application on a free port, until `close`.

    Args:
        arguments: the application's, besides those that follow from the workload.
        variables: more environment variables for its processes.

    Attributes:
        pid: the process whose descendants serve.
    """

    def __init__(
        self, workload: Workload, arguments: dict[str, object], variables: Mapping[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-bench-")
        folder, port = Path(self._folder.name), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "log"
        fields = "dtype", "device", "compile", "max_num_seqs"
        models = {"target_model": workload.target, "draft_model": workload.draft, "enable_prefix_caching": False}
        settings = models | {name: getattr(workload, name) for name in fields} | arguments
        application = {"name": "paceline", "import_path": "deployments:app", "args": settings}
        config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
        (folder / "serve.json").write_text(json.dumps({"proxy_location": "HeadOnly", **config}))
        environment = os.environ | ENVIRONMENT | serve_environment(AppConfig()) | {"PYTHONPATH": str(ROOT)}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [Path(sys.executable).with_name("serve"), "run", folder / "serve.json"],
                cwd=ROOT,
                env=environment | (variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        try:
            wait_until_ok(f"{self.url}/health", self._process, self._log)
        except BaseException:
            self.close()
            raise

    @property
    def log(self) -> str:
        return self._log.read_text()

    @contextmanager
    def frozen_afterwards(self) -> Iterator[None]:
        """Let it run for the block only; it costs nothing until the next one."""
        thaw(self.pid)
        time.sleep(SETTLE_S)
        try:
            yield
        finally:
            freeze(self.pid)

    def close(self) -> None:
        if self._process.poll() is None:
            thaw(self.pid)
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._folder.cleanup()


class ServeMethod:
    """Completions streamed over HTTP, one connection per stream; times are the client's. Frozen between batches.

    The client is aiohttp's, which reads HTTP in C: it shares the cores, and httpx would be a tenth of what is measured.

    Args:
        arm: `plain` serves without a draft.
    """

    def __init__(self, workload: Workload, arm: Arm) -> None:
        self.num_speculative_tokens: int | None = arm.k
        self._num_tokens = workload.num_tokens
        self._server = Server(workload, arm.settings)
        self._runner = asyncio.Runner()
        try:
            self._client = self._runner.run(_open_client(self._server.url))
            time.sleep(FIRST_SETTLE_S)
            freeze(self._server.pid)
        except BaseException:
            self._server.close()
            raise

    def run(self, prompts: Sequence[Sequence[int]], cell: Cell) -> Batch:
        with self._server.frozen_afterwards():
            return self._runner.run(self._run(prompts, cell.temperature))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()
        self._server.close()

    async def _run(self, prompts: Sequence[Sequence[int]], temperature: float) -> Batch:
        before = await self._read()
        started = time.perf_counter()
        streams = [self._stream(ids, temperature, seed) for seed, ids in enumerate(prompts)]
        texts = await asyncio.gather(*streams)
        elapsed = time.perf_counter() - started
        after = await self._read()
        return Batch(elapsed, acceptance_of(after) - acceptance_of(before), split_between(before, after), texts)

    async def _read(self) -> Metrics:
        async with self._client.get("/metrics", raise_for_status=True) as answer:
            families = text_string_to_metric_families(await answer.text())
            return Metrics(sample for family in families for sample in family.samples)

    async def _stream(self, ids: Sequence[int], temperature: float, seed: int) -> list[int]:
        body = {"prompt": list(ids), "max_tokens": self._num_tokens, "temperature": temperature, "seed": seed}
        body |= {"ignore_eos": True, "stream": True, "speculative": {"record": True}}
        usage, record = None, None
        async with self._client.post("/v1/completions", json=body) as answer:
            if not answer.ok:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            async for _, data, _ in data_of_events(answer.content.iter_any(), time.perf_counter):
                if data == "[DONE]":
                    break
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RuntimeError(str(chunk["error"]))
                usage, record = chunk.get("usage") or usage, chunk.get("record") or record
        if usage is None or record is None or usage["completion_tokens"] != self._num_tokens:
            raise RuntimeError(f"the server counted {usage}, {self._num_tokens} tokens were asked for")
        ids: list[int] = record["choices"][0]["token_ids"]
        return ids


async def _open_client(url: str) -> aiohttp.ClientSession:
    """Return a client for any number of streams; it must be made within the event loop that uses it."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_S)
    return aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
