"""Finding: what a check found, how bad it is, and what to do about it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deployments.diagnosis.http_client import VISIBLE

LEVELS = {"error": "red", "warning": "yellow", "ok": "green"}  # worst first


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about a subject; `advice` says what to do, empty if nothing."""

    level: Literal["error", "warning", "ok"]
    subject: str
    found: str
    advice: str = ""


def judged(subject: str, found: str, advice: str) -> Finding:
    """Return a warning if there is advice."""
    return Finding("warning" if advice else "ok", subject, found, advice)


def show(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print findings: as JSON, as a table on a terminal, else as lines."""
    if as_json:
        typer.echo(json.dumps(list(map(asdict, findings)), indent=2))
    elif (console := Console()).is_terminal:
        table = Table("", "subject", "found", "what to do")
        for finding in findings:
            texts = [escape(text.translate(VISIBLE)) for text in (finding.subject, finding.found, finding.advice)]
            table.add_row(f"[{LEVELS[finding.level]}]{finding.level}[/]", *texts)
        console.print(table)
    else:
        for finding in findings:
            advice = f"; {finding.advice}" if finding.advice else ""
            typer.echo(f"{finding.level}: {finding.subject}: {finding.found}{advice}")
