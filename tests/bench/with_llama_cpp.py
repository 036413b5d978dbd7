"""llama.cpp's server, plain and with the draft, over the same weights as GGUF; `llama-server` must be on the path."""

import asyncio
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from engine.execution.registry import resolve_device, resolve_dtype
from engine.stats import SpeculationStats
from tests.bench.figures import Batch, Timeline
from tests.bench.gguf_file import write_gguf
from tests.bench.workload import MAX_PROMPT_TOKENS, Cell, Workload
from tests.e2e.servers import free_port

BINARY = "llama-server"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
COUNTERS = ("draft_n", "draft_n_accepted")
"""What it counts of a text: draft tokens, and those accepted."""


def reason_to_skip() -> str | None:
    """Return why there can be no row of llama.cpp, if so."""
    return None if shutil.which(BINARY) else f"there is no {BINARY} on the path"


class LlamaCppMethod:
    """`llama-server` with its own settings but for the draft length, the threads and its prompt cache, which is off.

    Its end-of-text token is excluded from sampling, because it stops at it otherwise; the others go on after theirs.

    Args:
        num_speculative_tokens: 0 serves without the draft.

    Raises:
        RuntimeError: there is no `llama-server`, or it does not start with these models.
    """

    def __init__(self, workload: Workload, num_speculative_tokens: int) -> None:
        if (reason := reason_to_skip()) is not None:
            raise RuntimeError(reason)
        self.num_speculative_tokens: int | None = num_speculative_tokens
        self._num_tokens = workload.num_tokens
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-bench-")
        folder = Path(self._folder.name)
        self._log = folder / "log"
        dtype = resolve_dtype(workload.dtype, resolve_device(workload.device))
        write_gguf(Path(workload.target), folder / "target.gguf", dtype)
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [BINARY, "--model", str(folder / "target.gguf"), "--host", "127.0.0.1", "--port", str(port)]
        slots = max(cell.batch_size for cell in workload.cells)
        longest = max(cell.num_prompt_tokens or MAX_PROMPT_TOKENS for cell in workload.cells) + workload.num_tokens
        command += ["--parallel", str(slots), "--ctx-size", str(slots * (longest + 64)), "--no-webui"]
        command += ["--threads", str(workload.num_threads)]
        if num_speculative_tokens:
            write_gguf(Path(workload.draft), folder / "draft.gguf", dtype)
            command += ["--spec-type", "draft-simple", "--spec-draft-model", str(folder / "draft.gguf")]
            command += ["--spec-draft-n-max", str(num_speculative_tokens)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[Sequence[int]], cell: Cell) -> Batch:
        return asyncio.run(self._run(prompts, cell.temperature))

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def tokens(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens that it writes after a prompt at temperature 0."""
        answer = httpx.post(f"{self._url}/completion", json=self._body(prompt, 0.0, 0), timeout=START_TIMEOUT_S)
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return [token for chunk in chunks for token in chunk["tokens"]]

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self._url}/health", timeout=5).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"{BINARY} did not start:\n{self._log.read_text()[-4000:]}")

    async def _run(self, prompts: Sequence[Sequence[int]], temperature: float) -> Batch:
        async with aiohttp.ClientSession(self._url, timeout=aiohttp.ClientTimeout(total=None)) as client:
            started = time.perf_counter()
            streams = [self._stream(client, ids, temperature, seed) for seed, ids in enumerate(prompts)]
            results = await asyncio.gather(*streams)
            elapsed = time.perf_counter() - started
        timings = [timing for _, timing in results]
        num_drafted, num_accepted = (sum(timing.get(name, 0) for timing in timings) for name in COUNTERS)
        num_tokens = len(prompts) * self._num_tokens
        # Every pass but a prompt's gives the accepted tokens and one more; without a draft there is none to count.
        num_drafts = num_tokens - len(prompts) - num_accepted if num_drafted else 0
        stats = SpeculationStats(num_drafts, num_drafted, num_accepted)
        return Batch(elapsed, [timeline for timeline, _ in results], stats)

    async def _stream(
        self, client: aiohttp.ClientSession, ids: Sequence[int], temperature: float, seed: int
    ) -> tuple[Timeline, dict[str, Any]]:
        timeline = Timeline(time.perf_counter())
        last: dict[str, Any] = {}
        count = 0
        async with client.post("/completion", json=self._body(ids, temperature, seed)) as answer:
            if not answer.ok:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                last = json.loads(line.removeprefix(b"data: "))
                if "error" in last:
                    raise RuntimeError(str(last["error"]))
                if last["tokens"]:
                    timeline.arrivals_s.append(time.perf_counter())
                    count += len(last["tokens"])
        if last.get("tokens_predicted") != self._num_tokens:
            raise RuntimeError(f"{BINARY} wrote {count} tokens, {self._num_tokens} were asked for")
        return timeline, last["timings"]

    def _body(self, ids: Sequence[int], temperature: float, seed: int) -> dict[str, Any]:
        return {
            "prompt": list(ids),
            "n_predict": self._num_tokens,
            "temperature": temperature,
            "samplers": ["temperature"],
            "seed": seed,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
