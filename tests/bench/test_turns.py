"""Methods take turns: who comes when, what is paired, who fails."""

from dataclasses import replace
from itertools import pairwise, permutations

from rich.console import Console

from tests.bench import turns
from tests.bench.figures import Batch, Timeline
from tests.bench.worker import Worker
from tests.bench.workload import Cell, Workload
from tests.load.records import Acceptance


class Failing:
    """A worker that fails at the second batch that it is asked for."""

    draft_lengths: list[int | None] = [None]  # noqa: RUF012
    is_closed = False

    def run(self, cell: Cell, index: int) -> list[Batch]:
        if index == 1:
            raise RuntimeError("engine-speculative failed")
        return [Batch(1.0, [Timeline(0.0, [0.5, 1.0])], Acceptance())]

    def hang_up(self) -> None:
        assert not self.is_closed

    def close(self) -> None:
        self.is_closed = True


def test_nobody_always_follows_the_same_method() -> None:
    names = "plain", "speculative", "adaptive"
    asked = [name for turn in range(8) for name in turns.order(names, turn)]
    assert {pair for pair in pairwise(asked) if len(set(pair)) == 2} == set(permutations(names, 2))


def test_a_method_that_fails_is_named_and_the_others_go_on(workload: Workload, console: Console) -> None:
    def start(name: str, workload: Workload) -> turns.Contestant:
        if name == "engine-plain":
            raise RuntimeError("engine-plain failed")
        return failing if name == "engine-speculative" else Worker(name, workload)

    failing = Failing()
    names = ("engine-plain", "engine-speculative", "transformers")
    rows, failures = turns.collect(names, replace(workload, cells=[Cell(1, 0.0)]), console, start)
    assert [row.name for row in rows] == ["transformers"]
    assert failures == ["engine-plain failed", "engine-speculative failed"]
    assert failing.is_closed
