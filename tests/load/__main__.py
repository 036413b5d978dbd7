"""`python -m tests.load`: send load to a server, say what its users would see, and whether the texts were right."""

import asyncio
import sys
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.load.arms import Arm, in_turn
from tests.load.options import Options, parse
from tests.load.picture import draw_run, draw_sweep
from tests.load.records import Record
from tests.load.reference import differences, reference_texts
from tests.load.report import Report
from tests.load.run import Load, Run, open_run
from tests.load.server import LoadError
from tests.load.summary import summarize
from tests.load.sweep import Level, find_capacity


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a load test; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        report = asyncio.run(_test(options, console))
    except LoadError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    report.write(options.out, ["python", "-m", "tests.load", *words])
    png = options.out / "load.png"
    if report.levels:
        label = "requests per second" if options.rate else "users"
        draw_sweep(report.levels, options.slo, label, png)
    else:
        draw_run(report.run.records, options.slo, png)
    report.show(console)
    console.print(f"written: {options.out}/{{summary.json,requests.jsonl,config.json,load.png}}", style="dim")
    return 1 if report.problems else 0


async def _test(options: Options, console: Console) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"warming up {options.url}", total=None)
        async with open_run(options) as run:
            progress.remove_task(task)
            levels = await _sweep(run, progress) if options.sweep else []
            if not options.sweep:
                for turn in range(options.turns):
                    for arm in in_turn(options.arms, turn):
                        await _measure(run, arm, turn, run.load(), progress)
            differing = None
            if options.reference is not None:
                progress.add_task(f"texts of {options.reference}", total=None)
                differing = differences(run.records, await reference_texts(run.plan, run.records))
    return Report(run, levels, differing)


async def _sweep(run: Run, progress: Progress) -> list[Level]:
    """Find the capacity of one arm after the other."""
    options, levels, number = run.options, list[Level](), 0

    async def run_level(arm: Arm, load: float) -> Level:
        nonlocal number
        is_users = options.rate is None
        requests = Load(num_users=int(load), duration_s=options.duration_s) if is_users else run.open_load(load)
        number += 1
        records = await _measure(run, arm, number, requests, progress)
        slo = options.slo
        assert slo is not None
        return Level(arm.name, load, summarize(records, slo), slo.is_met(records))

    for arm in options.arms:
        levels += await find_capacity(
            partial(run_level, arm),
            first=options.rate or options.concurrency or 1,
            highest=options.max_level,
            is_whole=options.rate is None,
        )
    return levels


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
