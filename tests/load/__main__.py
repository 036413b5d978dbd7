"""`python -m tests.load`: send load to a server, say what its users would see, and whether the texts were right."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.status import Status

from .arms import Arm, in_turn
from .options import Options, parse
from .records import Record
from .reference import check, target_of
from .report import Report
from .run import Run, open_run
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
    console.print(f"written: {options.out}/{{summary.json,requests.jsonl,records.jsonl,config.json}}", style="dim")
    if any(record.kept for record in report.run.records):
        target = target_of(options.reference or "")
        auditor = f"--target-model {target}" if target else f"--url {options.url}"
        console.print(f"to audit it: paceline audit {options.out}/records.jsonl {auditor}", style="dim", soft_wrap=True)
    return 1 if report.problems else 0


async def _test(options: Options, console: Console) -> Report:
    with console.status(f"warming up {options.url}") as status:
        async with open_run(options) as run:
            levels = await _sweep(run, status) if options.sweep else []
            for turn in range(0 if options.sweep else options.num_turns):
                for arm in in_turn(options.arm_list, turn):
                    await _measure(run, arm, turn, None, status)
            if options.reference is not None:
                status.update(f"texts of {options.reference}")
                await check(run.plan, run.records)
    return Report(run, levels)


async def _sweep(run: Run, status: Status) -> list[Level]:
    """Find the capacity of every arm; they take turns, so that a machine whose speed drifts drifts for all of them."""
    options, slo = run.options, run.options.limits
    assert slo is not None
    first = options.rate or options.concurrency or 1
    is_whole = options.rate is None
    searches = {arm: search(first=first, highest=MAX_LOAD, is_whole=is_whole) for arm in options.arm_list}
    loads = {arm: next(steps) for arm, steps in searches.items()}
    levels: list[Level] = []
    while loads:
        for arm, load in [*loads.items()]:
            records = await _measure(run, arm, len(levels), load, status)
            levels.append(Level(arm.name, load, slo.is_met(records), summarize(records, slo)))
            try:
                loads[arm] = searches[arm].send(levels[-1].holds)
            except StopIteration:
                del loads[arm]
    return sorted(levels, key=lambda level: (level.arm, level.load))


async def _measure(run: Run, arm: Arm, turn: int, level: float | None, status: Status) -> list[Record]:
    """Measure a load, and show how its requests ended so far."""
    outcomes = Counter[str]()

    def count(record: Record) -> None:
        outcomes[record.outcome] += 1
        shown = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
        status.update(f"{arm.name}, turn {turn + 1}: {shown}")

    return await run.measure(arm, turn, run.load(level), count)


if __name__ == "__main__":
    sys.exit(main())
