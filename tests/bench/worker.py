"""One method in a process of its own, which runs the batches that it is asked for and sleeps in between."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TextIO

from pydantic import TypeAdapter

from tests.bench.figures import Batch, Method
from tests.bench.with_vllm import PEERS, VLLMMethod, environment
from tests.bench.workload import Cell, Workload

if TYPE_CHECKING:
    from cluster.config import RunAhead
    from engine.config import Speculation

PEERS_PYTHON = PEERS / "bin" / "python"
END_TIMEOUT_S = 120.0
BATCHES = TypeAdapter(list[Batch])
DRAFT_LENGTHS = TypeAdapter(list[int | None])


def methods(name: str, workload: Workload) -> Sequence[Callable[[], Method]]:
    """Return how to make a method; where there are several ways, the faster one counts.

    Ours are imported here: vLLM's environment has no Ray.
    """
    k = workload.num_speculative_tokens
    if name.startswith("vllm-"):
        return [partial(VLLMMethod, workload, 0 if name == "vllm-plain" else k)]
    from tests.bench.with_engine import EngineMethod
    from tests.bench.with_llama_cpp import LlamaCppMethod
    from tests.bench.with_serve import ServeMethod
    from tests.bench.with_transformers import AssistedMethod, TransformersMethod

    if name.startswith("llama.cpp-"):
        return [partial(LlamaCppMethod, workload, 0 if name == "llama.cpp-plain" else k)]
    if name == "transformers":
        return [partial(TransformersMethod, workload)]
    if name == "transformers-assisted":
        return [partial(AssistedMethod, workload, None), partial(AssistedMethod, workload, k)]
    place, arm = name.split("-", 1)
    setting = Setting.of(arm, k)
    if place == "engine":
        return [partial(EngineMethod, workload, setting.num_speculative_tokens, setting.speculation)]
    return [
        partial(ServeMethod, workload, setting.num_speculative_tokens, setting.speculation, run_ahead=setting.run_ahead)
    ]


class Setting(NamedTuple):
    """What an arm of the comparison means."""

    num_speculative_tokens: int
    speculation: "Speculation"
    run_ahead: "RunAhead"

    @classmethod
    def of(cls, arm: str, k: int) -> "Setting":
        """Return the meaning of `plain`, `speculative`, `adaptive` or `fixed-K`; with `-run-ahead` behind it, or alone,
        the draft runs ahead.

        Raises:
            ValueError: there is no such arm.
        """
        run_ahead: RunAhead = "on" if arm.endswith("run-ahead") else "off"
        base = arm.removesuffix("run-ahead").removesuffix("-")
        prefix, _, length = base.partition("-")
        if base in ("", "speculative"):
            return cls(k, "fixed", run_ahead)
        if base == "adaptive":
            return cls(k, "adaptive", run_ahead)
        if base == "plain" and run_ahead == "off":
            return cls(0, "off", run_ahead)
        if prefix != "fixed" or not length.isdigit():
            raise ValueError(f"there is no arm {arm!r}")
        return cls(int(length), "fixed", run_ahead)


def cells_of(name: str, workload: Workload) -> list[Cell]:
    """Return the cells that a method has a row in."""
    if name.startswith("transformers"):  # no prompt can join a running batch; assisted, it has one prompt
        most = 1 if name == "transformers-assisted" else math.inf
        return [cell for cell in workload.cells if cell.batch_size <= most and not cell.is_last_late]
    return workload.cells


HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""What served workers start with; transformers and the engine in process get the same."""


class Worker:
    """A method in this process, in all ways that it is tried.

    Attributes:
        draft_lengths: `num_speculative_tokens` of each way.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self._workload = workload
        self._methods: list[Method] = []
        try:
            for make in methods(name, workload):
                self._methods.append(make())
        except BaseException:
            self.close()
            raise
        self.draft_lengths = [method.num_speculative_tokens for method in self._methods]

    def run(self, cell: Cell, index: int) -> list[Batch]:
        """Run one of a cell's batches, each way."""
        prompts = list(self._workload.batches(cell))[index]
        return [method.run(prompts, cell) for method in self._methods]

    def hang_up(self) -> None:
        """Nobody waits for it."""

    def close(self) -> None:
        """Stop what was started."""
        for method in self._methods:
            method.close()


class WorkerProcess:
    """A worker in a process of its own, which ends with this object or with the process that made it.

    The workload and then a request for each batch go to its stdin, one line of JSON each; the draft lengths and then
    the answers come from its stdout. The end of its input is its end.

    Raises:
        RuntimeError: by everything but the closing: it failed; the message is the end of what it said.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self._name = name
        is_peer = name.startswith("vllm-")
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile("w+"))
            self._process = subprocess.Popen(
                [PEERS_PYTHON if is_peer else sys.executable, "-m", __name__, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=os.environ | (environment(workload.num_threads) if is_peer else HUGE_PAGES),
            )
            stack.callback(self._end)
            self.draft_lengths = DRAFT_LENGTHS.validate_json(self._ask(workload.to_json()))
            self._resources = stack.pop_all()

    def run(self, cell: Cell, index: int) -> list[Batch]:
        """Have one of a cell's batches run, each way."""
        return BATCHES.validate_json(self._ask(json.dumps({"cell": asdict(cell), "index": index})))

    def hang_up(self) -> None:
        """Let it end, without waiting for that."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """Let it end, and wait until it has."""
        self._resources.close()

    def _end(self) -> None:
        self.hang_up()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        if answer := self._process.stdout.readline():
            return answer
        self._end()
        self._log.seek(0)
        raise RuntimeError(f"{self._name} failed:\n{self._log.read()[-4000:]}")


def serve(name: str, requests: TextIO, answers: TextIO) -> None:
    """Be the other side of a `WorkerProcess` until there are no more requests."""
    worker = Worker(name, Workload.from_json(requests.readline()))
    try:
        print(json.dumps(worker.draft_lengths), file=answers, flush=True)
        for line in requests:
            request = json.loads(line)
            batches = worker.run(Cell(**request["cell"]), request["index"])
            print(BATCHES.dump_json(batches).decode(), file=answers, flush=True)
    finally:
        worker.close()


if __name__ == "__main__":
    # An end from outside (`timeout`, a closed terminal) must reach what was started: a cluster has its own session.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as found:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM writes its log to stdout
        serve(sys.argv[1], sys.stdin, found)
