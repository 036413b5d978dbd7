"""`python -m tests.load`: send load to a server, say what its users would see, and whether the texts were right."""

import asyncio
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .arms import Arm, in_turn
from .options import Options, parse
from .records import Record
from .reference import differences, reference_texts
from .report import Report
from .run import Load, Run, open_run
from .server import LoadError
from .summary import summarize
from .sweep import Level, search
from .tool_suite import main as run_suite

MAX_LOAD = 256
"""Users, or requests per second, that a sweep tries at most."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a load test, or the tool-call suite; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    options = None if words[:1] == ["tools"] else parse(words)
    try:
        if options is None:
            return run_suite(words[1:], console)
        report = asyncio.run(_test(options, console))
    except LoadError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    report.write(options.out, ["python", "-m", str(__package__), *words])
    report.show(console)
    console.print(f"written: {options.out}/{{summary.json,requests.jsonl,config.json}}", style="dim")
    return 1 if report.problems else 0


async def _test(options: Options, console: Console) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"warming up {options.url}", total=None)
        async with open_run(options) as run:
            progress.remove_task(task)
            levels = await _sweep(run, progress) if options.sweep else []
            if not options.sweep:
                for turn in range(options.num_turns):
                    for arm in in_turn(options.arm_list, turn):
                        await _measure(run, arm, turn, run.load(), progress)
            differing = None
            if options.reference is not None:
                progress.add_task(f"texts of {options.reference}", total=None)
                differing = differences(run.records, await reference_texts(run.plan, run.records))
    return Report(run, levels, differing)


async def _sweep(run: Run, progress: Progress) -> list[Level]:
    """Find the capacity of every arm; they take turns, so that a machine whose speed drifts drifts for all of them."""
    options, slo = run.options, run.options.limits
    assert slo is not None
    is_users = options.rate is None
    first = options.rate or options.concurrency or 1
    searches = {arm: search(first=first, highest=MAX_LOAD, is_whole=is_users) for arm in options.arm_list}
    loads: dict[Arm, float] = {arm: next(steps) for arm, steps in searches.items()}
    levels: list[Level] = []
    while loads:
        for arm, load in [*loads.items()]:
            requests = Load(num_users=int(load), duration_s=options.duration_s) if is_users else run.open_load(load)
            records = await _measure(run, arm, len(levels), requests, progress)
            levels.append(Level(arm.name, load, summarize(records, slo), slo.is_met(records)))
            try:
                loads[arm] = searches[arm].send(levels[-1].holds)
            except StopIteration:
                del loads[arm]
    return sorted(levels, key=lambda level: (level.arm, level.load))


async def _measure(run: Run, arm: Arm, turn: int, load: Load, progress: Progress) -> list[Record]:
    """Measure a load, with a bar that counts its requests."""
    task = progress.add_task("", total=load.num_expected)
    outcomes = {"ok": 0, "429": 0, "failed": 0}

    def count(record: Record) -> None:
        outcomes[record.outcome if record.outcome in outcomes else "failed"] += 1
        shown = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items() if number)
        progress.update(task, advance=1, description=f"{arm.name}, turn {turn + 1}: {shown}")

    records = await run.measure(arm, turn, load, count)
    progress.remove_task(task)
    return records


if __name__ == "__main__":
    sys.exit(main())
