"""Report: tables for a terminal, and the files of a run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .arms import Ratio, speed_up, verdict
from .records import LATENCIES, Record, Slo
from .reference import Difference
from .run import Run
from .summary import Summary, by_domain, summarize
from .sweep import Level, capacity

MAX_LAG_S = 0.02
"""A client whose event loop is later than this at the 99th percentile measures itself."""
_MAX_SHOWN = 5


class Report:
    """What a run amounts to.

    Attributes:
        summaries: by arm.
        differing: texts that are not the reference's; None if they were not compared.
    """

    def __init__(self, run: Run, levels: Sequence[Level], differing: Sequence[Difference] | None) -> None:
        self.run = run
        self.levels = levels
        self.differing = differing
        names = [arm.name for arm in run.options.arm_list]
        self.baseline = "off" if "off" in names else names[0]
        self.summaries = {name: self._summary(name) for name in names}

    @property
    def problems(self) -> list[str]:
        slo, found = self.run.options.limits, []
        for name, summary in self.summaries.items():
            if not summary.num_ok:
                found.append(f"no request of arm {name} succeeded")
            if not self.levels:  # a sweep overloads the server on purpose
                found += [f"{count} requests of arm {name}: {outcome}" for outcome, count in summary.failures.items()]
            if slo and self.levels and not capacity(self.levels, name):
                found.append(f"arm {name} misses the SLO at the first load already: {slo}")
            elif slo and not self.levels and not slo.is_met(self._records(name)):
                found.append(f"arm {name} misses the SLO ({summary.good_share:.4f} of the requests): {slo}")
        differing = self.differing or ()
        found += [str(difference) for difference in differing[:_MAX_SHOWN]]
        if len(differing) > _MAX_SHOWN:
            found.append(f"{len(differing) - _MAX_SHOWN} more texts differ")
        return found

    def notes(self) -> list[str]:
        notes = list(self.run.plan.notes)
        if left_s := self.run.plan.server.compiles_for_s:
            notes.append(f"figures of eager passes: compiling took about {left_s} s more; wait, and measure again")
        lags = sorted(self.run.lag.lags_s)
        if lags and (lag_s := lags[int(0.99 * (len(lags) - 1))]) > MAX_LAG_S:
            notes.append(f"this client was {1000 * lag_s:.0f} ms late (p99): it, or this machine, is the bottleneck")
        if not any(count for record in self.run.records for _, count in record.chunks):
            notes.append("no ITL: the server does not say how many tokens a chunk has, and a chunk may have several")
        return notes

    def speed_ups(self) -> dict[str, dict[str, Ratio]]:
        """Return by arm and domain (`all` first) how many times as fast as the baseline it generates tokens."""
        if self.levels:
            return {}
        result: dict[str, dict[str, Ratio]] = {}
        for arm in self.summaries:
            if arm == self.baseline:
                continue
            groups = {"all": self.run.records, **by_domain(self.run.records)}
            ratios = {name: speed_up(group, arm, self.baseline) for name, group in groups.items()}
            result[arm] = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        return result

    def as_json(self) -> dict[str, Any]:
        """Return `summary.json`."""
        arms: dict[str, Any] = {name: summary.as_json() for name, summary in self.summaries.items()}
        for name, fields in arms.items():
            domains = by_domain(self._records(name)).items()
            fields["domains"] = {domain: summarize(of, self.run.options.limits).as_json() for domain, of in domains}
        speed_ups = self.speed_ups().items()
        return {
            "arms": arms,
            "baseline": self.baseline,
            "speed_up": {arm: {name: asdict(ratio) for name, ratio in ratios.items()} for arm, ratios in speed_ups},
            "levels": [
                {"arm": level.arm, "load": level.load, "holds": level.holds, **level.summary.as_json()}
                for level in self.levels
            ],
            "capacity": {name: capacity(self.levels, name) for name in self.summaries} if self.levels else None,
            "differing_texts": None if self.differing is None else [asdict(text) for text in self.differing],
            "problems": self.problems,
            "notes": self.notes(),
        }

    def write(self, folder: Path, command: Sequence[str]) -> None:
        """Write the files of the run; the folder is made if needed."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "command": list(command),
            "start_unix_s": self.run.clock.unix_s,
            "options": self.run.options.model_dump(mode="json"),
            "server": asdict(self.run.plan.server),
        }
        _write_json(folder / "config.json", config)
        _write_json(folder / "summary.json", self.as_json())
        with (folder / "requests.jsonl").open("w") as file:
            file.writelines(json.dumps(record.as_json()) + "\n" for record in self.run.records)

    def show(self, console: Console) -> None:
        if self.levels:
            console.print(_levels_table(self.levels, self.run.options.rate is None))
            for name in self.summaries:
                unit = "users" if self.run.options.rate is None else "requests/s"
                console.print(f"{name}: {capacity(self.levels, name):g} {unit} at {self.run.options.limits}")
        else:
            console.print(_figures_table(self.summaries, self.run.options.limits))
        speed_ups = self.speed_ups()
        if speed_ups:
            console.print(self._domains_table(speed_ups))
            for arm, ratios in speed_ups.items():
                if "all" in ratios:
                    console.print(verdict(arm, self.baseline, ratios["all"]), highlight=False)
        if self.differing is not None:
            checked = sum(record.is_ok for record in self.run.records)
            console.print(f"{checked - len(self.differing)} of {checked} texts are the reference's")
        for note in self.notes():
            console.print(note, style="yellow", markup=False)
        for problem in self.problems:
            console.print(problem, style="red", markup=False)

    def _domains_table(self, speed_ups: Mapping[str, Mapping[str, Ratio]]) -> Table:
        title = f"tokens as fast as {self.baseline}, times (95 % interval of the mean over turns)"
        columns = ("arm", "domain", "speed-up", "accepted", "acceptance length", "TPOT p50, ms")
        table = Table(*columns, title=title)
        for arm, ratios in speed_ups.items():
            for domain, ratio in ratios.items():
                records = [record for record in self._records(arm) if domain in ("all", record.domain)]
                figures = summarize(records, None)
                tpot = figures.latencies_ms["tpot"]
                table.add_row(arm, domain, str(ratio), *_acceptance(figures), f"{tpot.p50:.1f}" if tpot else "-")
        return table

    def _records(self, arm: str) -> list[Record]:
        return [record for record in self.run.records if record.arm == arm]

    def _summary(self, arm: str) -> Summary:
        records = self._records(arm)
        summary = summarize(records, self.run.options.limits, acceptance=self.run.acceptance.get(arm))
        if self.differing is None:
            return summary
        num_differing = sum(difference.arm == arm for difference in self.differing)
        return replace(summary, texts_checked=summary.num_ok, texts_differing=num_differing)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _acceptance(summary: Summary) -> tuple[str, str]:
    counts = summary.acceptance
    if counts is None or counts.rate is None or counts.mean_length is None:
        return "-", "-"
    return f"{counts.rate:.2f}", f"{counts.mean_length:.2f}"


def _figures_table(summaries: Mapping[str, Summary], slo: Slo | None) -> Table:
    table = Table("", title="latencies in ms: p50 / p90 / p99")
    for name in summaries:
        table.add_column(name, justify="right")

    def add(title: str, cells: Sequence[str]) -> None:
        table.add_row(title, *cells)

    every = list(summaries.values())
    add("requests: ok / 429 / failed", [f"{s.num_ok} / {s.num_rejected} / {sum(s.failures.values())}" for s in every])
    add("requests/s", [f"{s.requests_per_s:.2f}" for s in every])
    add("tokens/s", [f"{s.tokens_per_s:,.1f}" for s in every])
    add("tokens: prompt / new, mean", [f"{s.mean_prompt_tokens:.0f} / {s.mean_tokens:.0f}" for s in every])
    for name in LATENCIES:
        values = [summary.latencies_ms[name] for summary in every]
        add(name.upper(), ["-" if v is None else f"{v.p50:,.1f} / {v.p90:,.1f} / {v.p99:,.1f}" for v in values])
    add("draft tokens accepted", [_acceptance(summary)[0] for summary in every])
    add("mean acceptance length", [_acceptance(summary)[1] for summary in every])
    if slo is not None:
        add("requests within the SLO", [f"{s.good_share or 0.0:.4f}" for s in every])
        add("goodput, requests/s", [f"{s.goodput_per_s or 0.0:.2f}" for s in every])
    return table


def _levels_table(levels: Sequence[Level], is_users: bool) -> Table:
    columns = ("arm", "users" if is_users else "requests/s", "within the SLO", "429", "failed", "tokens/s")
    table = Table(*columns, "TTFT", "TPOT", title="latencies in ms: p50 / p99")
    for level in levels:
        summary = level.summary
        latencies = [summary.latencies_ms["ttft"], summary.latencies_ms["tpot"]]
        table.add_row(
            level.arm,
            f"{level.load:g}",
            f"{summary.good_share or 0.0:.4f}",
            str(summary.num_rejected),
            str(sum(summary.failures.values())),
            f"{summary.tokens_per_s:,.1f}",
            *("-" if v is None else f"{v.p50:,.1f} / {v.p99:,.1f}" for v in latencies),
            style="" if level.holds else "dim",
        )
    return table
