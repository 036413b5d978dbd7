"""One method in a process of its own, which runs the batches that it is asked for and sleeps in between."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import TextIO

from pydantic import TypeAdapter

from tests.bench.contestants.with_vllm import PEERS, VLLMMethod, environment
from tests.bench.figures import Batch, Method
from tests.bench.workload import Arm, Cell, Workload

END_TIMEOUT_S = 120.0
BATCH = TypeAdapter(Batch)
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""What served workers start with; transformers and the engine in process get the same."""


def make_method(name: str, workload: Workload) -> Method:
    """Return a method that has loaded its models. Ours are imported here: vLLM's environment has no Ray."""
    k = workload.num_speculative_tokens
    if name.startswith("over-vllm-"):
        from tests.bench.contestants.with_engine import EngineMethod

        return EngineMethod(workload, Arm.of(name.removeprefix("over-vllm-"), k), "vllm")
    if name.startswith("vllm-"):
        draws = "probabilistic" if name == "vllm-probabilistic" else "greedy"
        return VLLMMethod(workload, 0 if name == "vllm-plain" else k, draws)
    from tests.bench.contestants.with_engine import EngineMethod
    from tests.bench.contestants.with_serve import ServeMethod
    from tests.bench.contestants.with_transformers import AssistedMethod, TransformersMethod

    if name == "transformers":
        return TransformersMethod(workload)
    if name == "transformers-assisted":
        return AssistedMethod(workload)
    place, arm = name.split("-", 1)
    return (EngineMethod if place == "engine" else ServeMethod)(workload, Arm.of(arm, k))


def cells_of(name: str, workload: Workload) -> list[Cell]:
    """Return the cells that a method has a row in: assisted generation takes one prompt."""
    return [cell for cell in workload.cells if cell.batch_size == 1 or name != "transformers-assisted"]


class Worker:
    """A method in this process."""

    def __init__(self, name: str, workload: Workload) -> None:
        self._workload = workload
        self._method = make_method(name, workload)
        self.num_speculative_tokens = self._method.num_speculative_tokens

    def run(self, cell: Cell, index: int) -> Batch:
        return self._method.run(self._workload.batches(cell)[index], cell)

    def hang_up(self) -> None:
        """Nobody waits for it."""

    def close(self) -> None:
        self._method.close()


class WorkerProcess:
    """A worker in a process of its own, which ends with this object or with the process that made it.

    The workload and then a request for each batch go to its stdin, one line of JSON each; the draft length and then
    the answers come from its stdout. The end of its input is its end.

    Raises RuntimeError if it failed; the message is the end of what it said.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self._name = name
        is_peer = name.startswith(("vllm-", "over-vllm-"))
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile("w+"))
            self._process = subprocess.Popen(
                [PEERS / "bin" / "python" if is_peer else sys.executable, "-m", __name__, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=os.environ | (environment(workload.num_threads) if is_peer else HUGE_PAGES),
            )
            stack.callback(self._end)
            self.num_speculative_tokens: int | None = json.loads(self._ask(workload.to_json()))
            self._resources = stack.pop_all()

    def run(self, cell: Cell, index: int) -> Batch:
        return BATCH.validate_json(self._ask(json.dumps({"cell": asdict(cell), "index": index})))

    def hang_up(self) -> None:
        """Let it end, without waiting for that."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
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
        print(json.dumps(worker.num_speculative_tokens), file=answers, flush=True)
        for line in requests:
            request = json.loads(line)
            batch = worker.run(Cell(**request["cell"]), request["index"])
            print(BATCH.dump_json(batch).decode(), file=answers, flush=True)
    finally:
        worker.close()


if __name__ == "__main__":
    # An end from outside (`timeout`, a closed terminal) must reach what was started: a cluster has its own session.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM writes its log to stdout
        serve(sys.argv[1], sys.stdin, answers)
