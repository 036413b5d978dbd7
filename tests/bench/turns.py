"""Methods side by side: all are alive, and the batches of a cell are taken in turn.

The machine's speed drifts by half over minutes. Methods whose batches alternate share the drift, so that what one makes
of a turn can be divided by what another makes of the same turn (`figures.paired_ratio`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


def collect(
    names: Sequence[str], workload: Workload, console: Console, start: Start = WorkerProcess
) -> tuple[list[Row], list[str]]:
    """Measure methods side by side. Returns the rows, cell by cell, and what went wrong."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, transient=True) as progress,
        _alive(names, workload, start, progress) as group,
    ):
        return list(group.rows(workload, progress)), group.failures


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

    def rows(self, workload: Workload, progress: Progress) -> Iterator[Row]:
        """Measure cell after cell, each with those that have it."""
        cells = {name: cells_of(name, workload) for name in self.workers}
        for cell in dict.fromkeys(cell for own in cells.values() for cell in own):
            names = [name for name in self.workers if cell in cells[name]]
            if names:
                yield from self._rows_of(cell, names, workload, progress)

    def _rows_of(self, cell: Cell, names: Sequence[str], workload: Workload, progress: Progress) -> Iterator[Row]:
        num_turns = len(list(workload.batches(cell)))
        task = progress.add_task(f"batch {cell.batch_size}, T={cell.temperature:g}", total=(1 + num_turns) * len(names))
        timed: dict[str, list[list[Batch]]] = {name: [] for name in names}
        for name in names:
            self._run(name, cell, 0)  # warms up
            progress.advance(task)
        for turn in range(num_turns):
            for name in order(names, turn):
                timed[name] += self._run(name, cell, turn)
                progress.advance(task)
        for name in names:
            if name in self.workers:
                ways = zip(self.workers[name].draft_lengths, zip(*timed[name], strict=True), strict=True)
                tried = [row_of(name, draft_length, workload, cell, batches) for draft_length, batches in ways]
                yield max(tried, key=lambda row: row.tokens_per_s)

    def _run(self, name: str, cell: Cell, index: int) -> list[list[Batch]]:
        """Run one batch; returns what each way took, or nothing where the method has failed."""
        if name not in self.workers:
            return []
        try:
            return [self.workers[name].run(cell, index)]
        except RuntimeError as error:
            self.failures.append(str(error))
            self.workers.pop(name).close()
            return []


@contextmanager
def _alive(names: Sequence[str], workload: Workload, start: Start, progress: Progress) -> Iterator[_Group]:
    """Start workers, one after the other, and end them all however the block ends."""
    group = _Group()
    task = progress.add_task("starting", total=len(names))
    try:
        for name in names:
            progress.update(task, description=f"starting {name}")
            try:
                group.workers[name] = start(name, workload)
            except RuntimeError as error:
                group.failures.append(str(error))
            progress.advance(task)
        yield group
    finally:
        for worker in group.workers.values():
            worker.hang_up()  # all at once: a cluster takes seconds to end
        for worker in group.workers.values():
            worker.close()
