"""audit_files: audits files of records. AuditReport: what the audits of many records say together."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deployments.diagnosis.auditors import Auditor
from deployments.diagnosis.http_client import VISIBLE
from deployments.records.record import Record
from deployments.records.record_lines import files_of, read_records
from deployments.records.record_reader import AuditBody, AuditedChoice

GROUP = 32  # records that are read before the first of them is audited
NUM_SHOWN = 20
BAR_CHARS = 40
GUESSED = "it has no token ids, and the target differs from those made of its text"


@dataclass(slots=True)
class AuditReport:
    """Sorts answers into equal, near (only margins up to `near` differ), different and not checked."""

    near: float
    num_tokens: int = 0
    writing_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    reasons: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The places of records that could not be checked, by reason."""
    margins: list[float] = field(default_factory=list)
    differing: list[tuple[float, str]] = field(default_factory=list)
    """The margin and the words of the first difference of each text that counts."""
    fingerprints: set[tuple[str, str]] = field(default_factory=set)

    def add(self, place: str, record: Record | str, outcome: AuditBody | str) -> None:
        """Count a record's outcome; a text says why it cannot be checked."""
        choices = [] if isinstance(outcome, str) else outcome.choices
        unequal = [choice for choice in choices if not choice.is_equal(self.near)]
        if any(choice.is_tokenized for choice in unequal):
            outcome = GUESSED
        if isinstance(outcome, str) or isinstance(record, str):
            self.counts["not checked"] += 1
            self.reasons[str(outcome)].append(place)
            return
        is_near = any(not choice.is_equal(0.0) for choice in choices)
        self.counts["different" if unequal else "near" if is_near else "equal"] += 1
        self.num_tokens += sum(choice.num_tokens for choice in choices)
        self.writing_s += record.seconds or 0.0
        self.margins += [each.margin for choice in choices for each in choice.differences]
        self.differing += [_first(place, choice, self.near) for choice in unequal]
        self.fingerprints.add((outcome.recorded_fingerprint or "an unknown server", outcome.system_fingerprint))

    @property
    def status(self) -> int:
        """The exit status: 1 if an answer differs; else 2 if one was not checked, or there is none; else 0."""
        if self.counts["different"]:
            return 1
        return 2 if self.counts["not checked"] or not self.counts else 0

    def lines(self, seconds: float) -> Iterator[str]:
        """Yield the report of an audit that took `seconds`."""
        num_answers, speed = self.counts.total() - self.counts["not checked"], self.num_tokens / seconds
        yield f"{num_answers} answers of {self.num_tokens:,} tokens in {seconds:.1f} s: {speed:,.0f} tokens/s"
        if self.writing_s:
            yield f"writing them took {self.writing_s:.1f} s, {self.num_tokens / self.writing_s:,.0f} tokens/s each"
        for recorded, here in sorted(self.fingerprints):
            yield f"written by {recorded}, audited by {here}"
        yield ", ".join(f"{self.counts[name]} {name}" for name in ("equal", "near", "different", "not checked"))
        for reason, places in self.reasons.items():
            yield f"not checked: {len(places)}, the first at {places[0]}: {reason}"
        for _, words in sorted(self.differing, reverse=True)[:NUM_SHOWN]:
            yield f"different: {words}"
        if len(self.differing) > NUM_SHOWN:
            yield f"different: {len(self.differing) - NUM_SHOWN} more"
        powers = Counter(math.floor(math.log10(max(margin, 1e-9))) for margin in self.margins)
        for power, count in sorted(powers.items()):
            bar = "#" * math.ceil(BAR_CHARS * count / max(powers.values()))
            yield f"margins from 1e{power:+03d} {bar} {count}"


def _first(place: str, choice: AuditedChoice, near: float) -> tuple[float, str]:
    where = f"{place}, choice {choice.index}"
    first = next((each for each in choice.differences if each.margin > near), None)
    if first is None:
        apart = f"log probabilities are up to {choice.logprobs_apart:g} apart"
        return math.inf, f"{where}: {'; '.join(choice.problems) or apart}"
    pair = f"{first.token_id} {first.token!r}, the target writes {first.target_token_id} {first.target_token!r}"
    return first.margin, f"{where}, token {first.position}: {pair}, margin {first.margin:.4g}"


def audit_files(source: Path, audit: Auditor, near: float) -> int:
    """Audit a file or a folder of records with a progress bar, print the report, and return the exit status.

    Raises:
        FileNotFoundError: there is no such file, or no file of JSON lines in the folder.
    """
    report, started, console, files = AuditReport(near), time.perf_counter(), Console(stderr=True), files_of(source)
    num_lines = sum(file.read_bytes().count(b"\n") for file in files)
    columns = (TextColumn("auditing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_lines)
        entries = chain.from_iterable(map(read_records, files))
        while group := list(islice(entries, GROUP)):
            outcomes = iter(audit([record for _, record in group if not isinstance(record, str)]))
            for place, record in group:
                report.add(place, record, record if isinstance(record, str) else next(outcomes))
            progress.advance(task, len(group))
    for line in report.lines(time.perf_counter() - started):
        typer.echo(line.translate(VISIBLE))
    return report.status
