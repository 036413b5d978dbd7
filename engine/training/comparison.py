"""Compares everything that can draft for a target on given prompts, one request at a time, as the engine serves it.

Each candidate generates the same texts with drafts of k tokens, so their times differ by drafting alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.llm import LLM
from engine.params import SamplingParams
from engine.protocols import Draft

PLAIN = {"drafting": "none", "draft_model": "none"}


@dataclass
class Served:
    """The measurements of a candidate that is served with `settings`; `lengths` are mean acceptance lengths by task."""

    settings: Mapping[str, Any]
    per_position: list[float]
    lengths: dict[str, float]
    draft_ms: float
    token_ms: float
    megabytes: float

    @property
    def name(self) -> str:
        """The settings, as for the command line of `serve`."""
        shown = {name: value for name, value in self.settings.items() if name != "draft_model" or value != "none"}
        return " ".join(f"{name}={value}" for name, value in shown.items())


@dataclass
class _Stopwatch:
    times: list[float] = field(default_factory=list)

    def around(self, drafter: Any) -> None:
        name = "draft" if hasattr(drafter, "draft") else "propose"
        call: Callable[..., Any] = getattr(drafter, name)

        def draft(*args: object, **kwargs: object) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self.times.append(time.perf_counter() - started)
            return result

        async def propose(*args: object) -> list[Draft]:
            started = time.perf_counter()
            result: list[Draft] = await call(*args)
            self.times.append(time.perf_counter() - started)
            return result

        setattr(drafter, name, draft if name == "draft" else propose)


def candidates(draft: Path | None, heads: Sequence[Path], self_layers: int) -> list[dict[str, Any]]:
    """Return the settings of plain decoding and of each method that can draft; 0 layers is no self-draft."""
    settings: list[dict[str, Any]] = [dict(PLAIN)]
    if draft is not None:
        settings.append({"drafting": "model", "draft_model": str(draft)})
    settings += [{"drafting": "head", "draft_model": str(head)} for head in heads]
    settings.append({"drafting": "suffix", "draft_model": "none"})
    if self_layers:
        settings.append({"drafting": "self", "draft_model": "none", "self_draft_layers": self_layers})
    return settings


def measure(
    target: Path,
    settings: Mapping[str, Any],
    prompts: Mapping[str, Sequence[str]],
    k: int,
    temperature: float,
    num: int,
) -> Served:
    """Generate `num` tokens after the prompts of each task, and measure acceptance and times."""
    llm = LLM(target, speculation="fixed", num_speculative_tokens=k, max_num_seqs=1, **settings)
    stopwatch, engine = _Stopwatch(), llm.engine
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=num)
    llm.generate(next(iter(prompts.values()))[:1], params, show_progress=False)
    verifier: Any = engine.verifier
    stopwatch.around(engine.drafter if verifier._drafter is None else verifier._drafter)
    before, stats, lengths = list(llm.stats.num_accepted_tokens_per_pos), llm.stats, {}
    first_drafts, tokens, started = stats.num_drafts, 0, time.perf_counter()
    for task, texts in prompts.items():
        drafts, accepted = stats.num_drafts, stats.num_accepted_tokens
        outputs = llm.generate(list(texts), params, show_progress=False)
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        lengths[task] = 1 + (stats.num_accepted_tokens - accepted) / max(1, stats.num_drafts - drafts)
    token_ms = 1000 * (time.perf_counter() - started) / max(1, tokens)
    drafts = max(1, stats.num_drafts - first_drafts)
    after = [count - old for count, old in zip(stats.num_accepted_tokens_per_pos, [*before, *[0] * k], strict=False)]
    files = Path(str(settings["draft_model"])).glob("*.safetensors")
    return Served(
        settings,
        [count / drafts for count in after],
        lengths,
        1000 * sum(stopwatch.times) / max(1, len(stopwatch.times)),
        token_ms,
        sum(file.stat().st_size for file in files) / 1e6,
    )


def show(served: Sequence[Served], k: int, temperature: float, price: float | None, console: Console) -> None:
    """Print a row per candidate, of which plain decoding is the first, and the fastest candidate's settings."""
    table = Table(title=f"Served one request at a time, k = {k}, temperature {temperature:g}")
    tasks = list(served[0].lengths)
    by_task = tasks if len(tasks) > 1 else []
    headings = [*(str(i + 1) for i in range(k)), "length", *by_task, "draft ms", "MB", "ms/token", "speed-up"]
    table.add_column("drafting", no_wrap=True)
    for heading in [*headings, *(["cost/M"] if price is not None else [])]:
        table.add_column(heading, justify="right")
    for row in served:
        rates = [f"{rate:.3f}" for rate in row.per_position] + [""] * (k - len(row.per_position))
        cells = [*rates, f"{1 + sum(row.per_position):.2f}", *(f"{row.lengths[task]:.2f}" for task in by_task)]
        cells += [f"{row.draft_ms:.2f}", f"{row.megabytes:.1f}", f"{row.token_ms:.2f}"]
        cells.append(f"{served[0].token_ms / row.token_ms:.2f}")
        if price is not None:
            cells.append(f"{price * row.token_ms / 3.6:.3f}")
        model, layers = (row.settings.get(name) for name in ("draft_model", "self_draft_layers"))
        short = f"{row.settings['drafting']} {layers or ''}{'' if model == 'none' else Path(str(model)).name}"
        table.add_row(short.strip(), *cells)
    console.print(table)
    best = min(served, key=lambda row: row.token_ms)
    console.print(f"serve: {best.name}", highlight=False, soft_wrap=True)
