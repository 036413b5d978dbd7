"""One method in a process of its own: a workload comes by stdin, a row per cell goes to stdout once it is there."""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from tests.bench.figures import Method, Row, measure
from tests.bench.with_vllm import PEERS, VLLMMethod, environment
from tests.bench.workload import Cell, Workload

PEERS_PYTHON = PEERS / "bin" / "python"


def methods(name: str, workload: Workload) -> Sequence[Callable[[], Method]]:
    """Return how to make a method; where there are several ways, the faster one counts.

    Ours are imported here: vLLM's environment has no Ray.
    """
    k = workload.num_speculative_tokens
    if name.startswith("vllm-"):
        return [partial(VLLMMethod, workload, 0 if name == "vllm-plain" else k)]
    from tests.bench.with_engine import EngineMethod
    from tests.bench.with_serve import ServeMethod
    from tests.bench.with_transformers import AssistedMethod, TransformersMethod

    known: dict[str, Sequence[Callable[[], Method]]] = {
        "transformers": [partial(TransformersMethod, workload)],
        "transformers-assisted": [partial(AssistedMethod, workload, None), partial(AssistedMethod, workload, k)],
        "engine-plain": [partial(EngineMethod, workload, 0)],
        "engine-speculative": [partial(EngineMethod, workload, k)],
        "engine-adaptive": [partial(EngineMethod, workload, k, "adaptive")],
        "serve-plain": [partial(ServeMethod, workload, 0)],
        "serve-speculative": [partial(ServeMethod, workload, k)],
        "serve-adaptive": [partial(ServeMethod, workload, k, "adaptive")],
        "pinned-plain": [partial(ServeMethod, workload, 0, is_pinned=True)],
        "pinned-speculative": [partial(ServeMethod, workload, k, run_ahead="off", is_pinned=True)],
        "pinned-run-ahead": [partial(ServeMethod, workload, k, run_ahead="on", is_pinned=True)],
    }
    return known[name]


PINNED_CELLS = [Cell(1, temperature) for temperature in (0.0, 0.7, 1.0)]


def cells_of(name: str, workload: Workload) -> list[Cell]:
    """Return the cells that a method has a row in."""
    if name.startswith("pinned-"):
        return PINNED_CELLS
    if name.startswith("transformers"):  # a batch of its takes nobody in, and an assisted one is single
        most = 1 if name == "transformers-assisted" else math.inf
        return [cell for cell in workload.cells if cell.batch_size <= most and not cell.is_last_late]
    return workload.cells


def rows(name: str, workload: Workload) -> Iterator[Row]:
    """Measure a method in this process, in all cells that it has."""
    made: list[Method] = []
    try:
        made += [make() for make in methods(name, workload)]
        for cell in cells_of(name, workload):
            tried = [measure(name, method, workload, cell) for method in made]
            yield max(tried, key=lambda row: row.tokens_per_s)
    finally:
        for method in made:
            method.close()


def rows_of_a_fresh_process(name: str, workload: Workload) -> Iterator[Row]:
    """Measure a method in a process that ends with it.

    Raises:
        RuntimeError: it failed; the message is the end of what it said.
    """
    with tempfile.TemporaryFile("w+") as log:
        is_peer = name.startswith("vllm-")
        with subprocess.Popen(
            [PEERS_PYTHON if is_peer else sys.executable, "-m", __name__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | environment(workload.num_threads) if is_peer else None,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(workload.to_json())
            process.stdin.close()
            for line in process.stdout:
                yield Row(**json.loads(line))
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{name} failed:\n{log.read()[-4000:]}")


if __name__ == "__main__":
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as found:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM writes its log to stdout
        for finished in rows(sys.argv[1], Workload.from_json(sys.stdin.read())):
            print(json.dumps(asdict(finished)), file=found, flush=True)
