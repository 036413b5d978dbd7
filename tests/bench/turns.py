"""Methods side by side: all are alive, and the batches of a cell are taken in turn.

The machine's speed drifts by half over minutes. Methods whose batches alternate share the drift, so the speeds of two
methods in the same turn can be compared (`figures.paired_ratio`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.bench.figures import Batch, Row, row_of
from tests.bench.worker import WorkerProcess, cells_of
from tests.bench.workload import Cell, Workload

T = TypeVar("T")


class Contestant(Protocol):
    """A method in all its ways: `worker.WorkerProcess`, or `worker.Worker` in this process."""

    draft_lengths: list[int | None]

    def run(self, cell: Cell, index: int) -> list[Batch]: ...

    def hang_up(self) -> None: ...

    def close(self) -> None: ...


Start = Callable[[str, Workload], Contestant]


def progress_bar(console: Console) -> Progress:
    """Return a bar with counts that is gone when its work is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def collect(
    names: Sequence[str], workload: Workload, console: Console, start: Start = WorkerProcess
) -> tuple[list[Row], list[str]]:
    """Measure methods side by side. Returns the rows, cell by cell, and what went wrong."""
    group = _Group()
    with progress_bar(console) as progress, ExitStack() as stack:
        stack.callback(group.end)
        for name in progress.track(names, description="starting"):
            with group.survives(name):
                group.workers[name] = start(name, workload)
        return [row for cell in workload.cells for row in group.rows(cell, workload, progress)], group.failures


def order(names: Sequence[T], turn: int) -> list[T]:
    """Return who comes when in a turn: there and back, then the same from the next one on.

    So nobody always follows the same one, and of a steady drift all have the same share after two turns.
    """
    first = turn // 2 % len(names)
    rotated = [*names[first:], *names[:first]]
    return rotated[::-1] if turn % 2 else rotated


class _Group:
    """The workers that are alive together. One that fails is named in `failures` and no longer among them."""

    def __init__(self) -> None:
        self.workers: dict[str, Contestant] = {}
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

    def rows(self, cell: Cell, workload: Workload, progress: Progress) -> Iterator[Row]:
        names = [name for name in self.workers if cell in cells_of(name, workload)]
        timed: dict[str, list[list[Batch]]] = {name: [] for name in names}
        warm_up = [(name, 0) for name in names]
        turns = [(name, turn) for turn in range(len(workload.batches(cell))) for name in order(names, turn)]
        description = f"batch {cell.batch_size}, T={cell.temperature:g}"
        for number, (name, turn) in enumerate(progress.track(warm_up + turns, description=description)):
            if name in self.workers:
                with self.survives(name):
                    batches = self.workers[name].run(cell, turn)
                    timed[name] += [batches] if number >= len(warm_up) else []
        for name in names:
            if name in self.workers:
                ways = zip(self.workers[name].draft_lengths, zip(*timed[name], strict=True), strict=True)
                tried = [row_of(name, draft_length, workload, cell, batches) for draft_length, batches in ways]
                yield max(tried, key=lambda row: row.tokens_per_s)

    def end(self) -> None:
        """End all workers at once: a cluster takes seconds to end."""
        for worker in self.workers.values():
            worker.hang_up()
        for worker in self.workers.values():
            worker.close()
