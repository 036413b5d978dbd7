"""python -m tests.faults: processes are killed or stopped under load.

report    every fault under eight seeded streams, and what their clients saw
soak      a random fault every second or two under mixed load: texts, hangs, counters, what is left behind
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from tests.faults.faults import FAULTS
from tests.faults.report import report
from tests.faults.soak import soak


def main(arguments: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    reporting = commands.add_parser("report")
    reporting.add_argument("--fault", action="append", choices=[*FAULTS], help="only this one; may be repeated")
    reporting.add_argument("--seed", type=int, default=0, help="of the moments at which faults come")
    soaking = commands.add_parser("soak")
    soaking.add_argument("--minutes", type=float, default=1.0)
    soaking.add_argument("--seed", type=int, default=0, help="of the faults and of the clients")
    soaking.add_argument("--json", type=Path, help="where to write the report, too")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if options.command == "soak":
        return bool(soak(60 * options.minutes, options.seed, options.json, console).problems)
    return bool(report(console, options.fault or [*FAULTS], options.seed))


if __name__ == "__main__":
    sys.exit(main())
