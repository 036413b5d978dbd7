"""Methods side by side: all are alive, and the batches of a cell are taken in turn.

The machine's speed drifts by half over minutes. Methods whose batches alternate share the drift, so the speeds of two
methods in the same turn can be compared (`figures.paired_ratio`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import track

from tests.bench.figures import Batch, Row, row_of
from tests.bench.worker import Worker, WorkerProcess, cells_of
from tests.bench.workload import Cell, Workload

Start = Callable[[str, Workload], Worker | WorkerProcess]


def collect(
    names: Sequence[str], workload: Workload, console: Console, start: Start = WorkerProcess
) -> tuple[list[Row], list[str]]:
    """Measure methods side by side. Returns the rows, cell by cell, and what went wrong."""
    group = _Group()
    try:
        for name in track(names, "starting", console=console, transient=True):
            with group.survives(name):
                group.workers[name] = start(name, workload)
        return [row for cell in workload.cells for row in group.rows(cell, workload, console)], group.failures
    finally:
        group.end()


def order(names: Sequence[str], turn: int) -> list[str]:
    """Return who comes when in a turn: there and back, then the same from the next one on.

    So nobody always follows the same one, and of a steady drift all have the same share after two turns.
    """
    first = turn // 2 % len(names)
    rotated = [*names[first:], *names[:first]]
    return rotated[::-1] if turn % 2 else rotated


class _Group:
    """The workers that are alive together. One that fails is named in `failures` and no longer among them."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker | WorkerProcess] = {}
        self.failures: list[str] = []

    @contextmanager
    def survives(self, name: str) -> Iterator[None]:
        """Continue without a method that fails."""
        try:
            yield
        except RuntimeError as error:
            self.failures.append(str(error))
            if name in self.workers:
                self.workers.pop(name).close()

    def rows(self, cell: Cell, workload: Workload, console: Console) -> Iterator[Row]:
        names = [name for name in self.workers if cell in cells_of(name, workload)]
        timed: dict[str, list[Batch]] = {name: [] for name in names}
        warm_up = [(name, 0) for name in names]
        turns = [(name, turn) for turn in range(len(workload.batches(cell))) for name in order(names, turn)]
        description = f"batch {cell.batch_size}, T={cell.temperature:g}"
        batches = track(warm_up + turns, description, console=console, transient=True)
        for number, (name, turn) in enumerate(batches):
            if name in self.workers:
                with self.survives(name):
                    batch = self.workers[name].run(cell, turn)
                    timed[name] += [batch] if number >= len(warm_up) else []
        for name in names:
            if name in self.workers:
                yield row_of(name, self.workers[name].num_speculative_tokens, workload, cell, timed[name])

    def end(self) -> None:
        """End all workers at once: a cluster takes seconds to end."""
        for worker in self.workers.values():
            worker.hang_up()
        for worker in self.workers.values():
            worker.close()
