"""Methods take turns: who comes when, what is paired, who fails."""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from rich.console import Console

from tests.bench import turns
from tests.bench.figures import Batch, Row, Timeline, paired_ratio
from tests.bench.worker import Worker
from tests.bench.workload import Cell, Workload
from tests.load.records import Acceptance


@dataclass(slots=True)
class Scripted:
    """A worker that notes who was asked when, and what for."""

    name: str
    asked: list[tuple[str, int]]
    raises: BaseException | None = None
    draft_lengths: list[int | None] = field(default_factory=lambda: [None])
    is_closed: bool = False

    def run(self, cell: Cell, index: int) -> list[Batch]:
        self.asked.append((self.name, index))
        if self.raises is not None and index == 1:
            raise self.raises
        return [Batch(1.0, [Timeline(0.0, [0.5, 1.0])], Acceptance()) for _ in self.draft_lengths]

    def hang_up(self) -> None:
        assert not self.is_closed

    def close(self) -> None:
        self.is_closed = True


def test_methods_take_turns_and_nobody_always_follows_the_same_one(workload: Workload, console: Console) -> None:
    asked: list[tuple[str, int]] = []
    workers = {name: Scripted(name, asked) for name in ("engine-plain", "engine-speculative", "engine-adaptive")}
    workload = replace(workload, cells=[Cell(1, 0.0)])
    turns.collect(tuple(workers), workload, console, lambda name, _: workers[name])
    num_turns = len(workload.batches(Cell(1, 0.0)))
    assert [index for _, index in asked] == [0] * 3 + [turn for turn in range(num_turns) for _ in workers]
    pairs = {(before, name) for (before, _), (name, _) in pairwise(asked[3:]) if before != name}
    assert len(pairs) == 3 * 2
    assert all(worker.is_closed for worker in workers.values())


def test_ratios_are_of_what_two_methods_made_of_the_same_turn() -> None:
    def row(*rates: float) -> Row:
        return Row("", 1, 0.0, None, 0.0, 0.0, 0.0, tokens_per_s_by_turn=list(rates))

    assert paired_ratio(row(400, 100, 200), row(200, 50, 50)) == 2
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio(row(1.0, 2.0), row(1.0))


def test_a_method_that_fails_is_named_and_the_others_go_on(workload: Workload, console: Console) -> None:
    def start(name: str, workload: Workload) -> turns.Contestant:
        if name == "engine-plain":
            raise RuntimeError("engine-plain failed")
        return failing if name == "engine-speculative" else Worker(name, workload)

    failing = Scripted("engine-speculative", [], RuntimeError("engine-speculative failed"))
    names = ("engine-plain", "engine-speculative", "transformers")
    rows, failures = turns.collect(names, replace(workload, cells=[Cell(1, 0.0)]), console, start)
    assert [row.name for row in rows] == ["transformers"]
    assert failures == ["engine-plain failed", "engine-speculative failed"]
    assert failing.is_closed
