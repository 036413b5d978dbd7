"""Report: tables for a terminal, and the files of a run."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .arms import Ratio, speed_up, verdict
from .records import LATENCIES, Record
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
        differing: requests whose texts are not the reference's; None if they were not compared.
    """

    def __init__(self, run: Run, levels: Sequence[Level]) -> None:
        self.run = run
        self.levels = levels
        is_checked = run.options.reference is not None
        self.differing = [record for record in run.records if record.difference] if is_checked else None
        self.slo = run.options.limits
        names = [arm.name for arm in run.options.arm_list]
        self.baseline = "off" if "off" in names else names[0]
        self.summaries = {name: self._summary(name) for name in names}

    @property
    def problems(self) -> list[str]:
        slo, problems = self.slo, []
        for name, summary in self.summaries.items():
            if not summary["num_ok"]:
                problems.append(f"no request of arm {name} succeeded")
            if not self.levels:  # a sweep overloads the server on purpose
                failures = summary["failures"].items()
                problems += [f"{count} requests of arm {name}: {outcome}" for outcome, count in failures]
            if slo and self.levels and not capacity(self.levels, name):
                problems.append(f"arm {name} misses the SLO at the first load already: {slo}")
            elif slo and not self.levels and not slo.is_met(self._records(name)):
                problems.append(f"arm {name} misses the SLO ({summary['good_share']:.4f} of the requests): {slo}")
        differing = self.differing or ()
        problems += [f"request {r.index} (arm {r.arm}, turn {r.turn}) {r.difference}" for r in differing[:_MAX_SHOWN]]
        if len(differing) > _MAX_SHOWN:
            problems.append(f"{len(differing) - _MAX_SHOWN} more texts differ")
        return problems

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
        groups = {"all": self.run.records, **by_domain(self.run.records)}
        result: dict[str, dict[str, Ratio]] = {}
        for arm in self.summaries:
            if arm != self.baseline:
                ratios = {name: speed_up(group, arm, self.baseline) for name, group in groups.items()}
                result[arm] = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        return result

    def as_json(self) -> dict[str, Any]:
        """Return `summary.json`."""
        arms = {}
        for name, summary in self.summaries.items():
            domains = by_domain(self._records(name)).items()
            arms[name] = summary | {"domains": {domain: summarize(records, self.slo) for domain, records in domains}}
        speed_ups = self.speed_ups().items()
        return {
            "arms": arms,
            "baseline": self.baseline,
            "speed_up": {arm: {name: asdict(ratio) for name, ratio in ratios.items()} for arm, ratios in speed_ups},
            "levels": [asdict(level) for level in self.levels],
            "capacity": {name: capacity(self.levels, name) for name in self.summaries} if self.levels else None,
            "differing_texts": None if self.differing is None else [record.as_json() for record in self.differing],
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
        for name, content in (("config", config), ("summary", self.as_json())):
            (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
        lines = {
            "requests": [record.as_json() for record in self.run.records],
            "records": [record.kept for record in self.run.records if record.kept is not None],
        }
        for name, entries in lines.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def show(self, console: Console) -> None:
        if self.levels:
            unit = "users" if self.run.options.rate is None else "requests/s"
            console.print(self._levels_table(unit))
            for name in self.summaries:
                console.print(f"{name}: {capacity(self.levels, name):g} {unit} at {self.slo}")
        else:
            console.print(self._figures_table())
        if self.speed_ups():
            console.print(self._domains_table())
            for arm, ratios in self.speed_ups().items():
                if "all" in ratios:
                    console.print(verdict(arm, self.baseline, ratios["all"]), highlight=False)
        if self.differing is not None:
            checked = sum(record.is_ok for record in self.run.records)
            console.print(f"{checked - len(self.differing)} of {checked} texts are the reference's")
        for note in self.notes():
            console.print(note, style="yellow", markup=False)
        for problem in self.problems:
            console.print(problem, style="red", markup=False)

    def _figures_table(self) -> Table:
        table = Table("", title="latencies in ms: p50 / p90 / p99")
        for name in self.summaries:
            table.add_column(name, justify="right")
        every = list(self.summaries.values())
        failed = [sum(summary["failures"].values()) for summary in every]
        outcomes = [f"{s['num_ok']} / {s['num_rejected']} / {count}" for s, count in zip(every, failed, strict=True)]
        rows = {
            "requests: ok / 429 / failed": outcomes,
            "requests/s": [f"{summary['requests_per_s']:.2f}" for summary in every],
            "tokens/s": [f"{summary['tokens_per_s']:,.1f}" for summary in every],
            "tokens: prompt / new, mean": [f"{s['mean_prompt_tokens']:.0f} / {s['mean_tokens']:.0f}" for s in every],
            **{name.upper(): [_latency(summary, name, "p50", "p90", "p99") for summary in every] for name in LATENCIES},
            "draft tokens accepted": [_accepted(summary, "rate") for summary in every],
            "mean acceptance length": [_accepted(summary, "mean_length") for summary in every],
        }
        if self.slo is not None:
            rows["requests within the SLO"] = [f"{summary['good_share']:.4f}" for summary in every]
            rows["goodput, requests/s"] = [f"{summary['goodput_per_s']:.2f}" for summary in every]
        for title, cells in rows.items():
            table.add_row(title, *cells)
        return table

    def _levels_table(self, unit: str) -> Table:
        columns = ("arm", unit, "within the SLO", "429", "failed", "tokens/s", "TTFT", "TPOT")
        table = Table(*columns, title="latencies in ms: p50 / p99")
        for level in self.levels:
            summary = level.summary
            failed = sum(summary["failures"].values())
            table.add_row(
                *(level.arm, f"{level.load:g}", f"{summary['good_share']:.4f}", str(summary["num_rejected"])),
                *(str(failed), f"{summary['tokens_per_s']:,.1f}"),
                *(_latency(summary, name, "p50", "p99") for name in ("ttft", "tpot")),
                style="" if level.holds else "dim",
            )
        return table

    def _domains_table(self) -> Table:
        title = f"tokens as fast as {self.baseline}, times (95 % interval of the mean over turns)"
        table = Table("arm", "domain", "speed-up", "accepted", "acceptance length", "TPOT p50, ms", title=title)
        for arm, ratios in self.speed_ups().items():
            for domain, ratio in ratios.items():
                records = [record for record in self._records(arm) if domain in ("all", record.domain)]
                figures = summarize(records, None)
                accepted = _accepted(figures, "rate"), _accepted(figures, "mean_length")
                table.add_row(arm, domain, str(ratio), *accepted, _latency(figures, "tpot", "p50"))
        return table

    def _records(self, arm: str) -> list[Record]:
        return [record for record in self.run.records if record.arm == arm]

    def _summary(self, arm: str) -> Summary:
        summary = summarize(self._records(arm), self.slo, acceptance=self.run.acceptance.get(arm))
        if self.differing is not None:
            differing = [record for record in self.differing if record.arm == arm]
            summary |= {"texts_checked": summary["num_ok"], "texts_differing": len(differing)}
        return summary


def _accepted(summary: Summary, figure: str) -> str:
    value = (summary["acceptance"] or {}).get(figure)
    return "-" if value is None else f"{value:.2f}"


def _latency(summary: Summary, name: str, *percentiles: str) -> str:
    values = summary["latencies_ms"][name]
    return "-" if values is None else " / ".join(f"{values[percentile]:,.1f}" for percentile in percentiles)
