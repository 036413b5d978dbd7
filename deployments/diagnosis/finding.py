"""Finding: what a check found, how bad it is, and what to do about it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import typer
from rich.console import Console
from rich.table import Table

Level = Literal["error", "warning", "ok"]
LEVELS: tuple[Level, ...] = ("error", "warning", "ok")
"""The worst first."""
_STYLES: dict[Level, str] = {"error": "red", "warning": "yellow", "ok": "green"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about a subject; `advice` is what to do, empty if nothing is."""

    level: Level
    subject: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.subject}: {self.found}" + (f"; {self.advice}" if self.advice else "")


def show(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print findings: as JSON, as a table on a terminal, else as lines."""
    console = Console()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    elif console.is_terminal:
        table = Table("", "subject", "found", "what to do")
        for finding in findings:
            style = _STYLES[finding.level]
            table.add_row(f"[{style}]{finding.level}[/{style}]", finding.subject, finding.found, finding.advice)
        console.print(table)
    else:
        typer.echo("\n".join(map(str, findings)))
