"""Compares everything that can draft for a target on one's own prompts, one request at a time, as the engine serves it.

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
    """The measurements of one candidate; `settings` are those that serve it.

    Attributes:
        lengths: mean acceptance length by task.
        megabytes: of weights, besides the target's.
    """

    settings: Mapping[str, Any]
    per_position: list[float]
    lengths: dict[str, float]
    draft_ms: float
    token_ms: float
    megabytes: float

    @property
    def name(self) -> str:
        """The settings, as they are written on the command line of `serve`."""
        shown = {name: value for name, value in self.settings.items() if name != "draft_model" or value != "none"}
        return " ".join(f"{name}={value}" for name, value in shown.items())


@dataclass
class _Stopwatch:
    """Times the calls of a drafter's method, whichever of the two kinds of drafters it is."""

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
    """Return the settings of plain decoding and of each method that can draft; no layers is no self-draft."""
    found: list[dict[str, Any]] = [dict(PLAIN)]
    if draft is not None:
        found.append({"drafting": "model", "draft_model": str(draft)})
    found += [{"drafting": "head", "draft_model": str(head)} for head in heads]
    found.append({"drafting": "suffix", "draft_model": "none"})
    if self_layers:
        found.append({"drafting": "self", "draft_model": "none", "self_draft_layers": self_layers})
    return found


def measure(
    target: Path,
    settings: Mapping[str, Any],
    prompts: Mapping[str, Sequence[str]],
    k: int,
    temperature: float,
    num: int,
) -> Served:
    """Generate `num` tokens after the prompts of each task, and return what drafting did for them."""
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
    """Print a row per candidate and, in words, the one to serve; the first is plain decoding."""
    table = Table(title=f"Served one request at a time, k = {k}, temperature {temperature:g}")
    tasks = list(served[0].lengths)
    by_task = tasks if len(tasks) > 1 else []
    headings = [*(str(i + 1) for i in range(k)), "length", *by_task, "draft ms", "MB", "ms/token", "speed-up"]
    table.add_column("drafting", no_wrap=True)
    for heading in [*headings, *(["cost/M"] if price is not None else [])]:
        table.add_column(heading, justify="right")
    for one in served:
        rates = [f"{rate:.3f}" for rate in one.per_position] + [""] * (k - len(one.per_position))
        cells = [*rates, f"{1 + sum(one.per_position):.2f}", *(f"{one.lengths[task]:.2f}" for task in by_task)]
        cells += [f"{one.draft_ms:.2f}", f"{one.megabytes:.1f}", f"{one.token_ms:.2f}"]
        cells.append(f"{served[0].token_ms / one.token_ms:.2f}")
        if price is not None:
            cells.append(f"{price * one.token_ms / 3.6:.3f}")
        model, layers = (one.settings.get(name) for name in ("draft_model", "self_draft_layers"))
        short = f"{one.settings['drafting']} {layers or ''}{'' if model == 'none' else Path(str(model)).name}"
        table.add_row(short.strip(), *cells)
    console.print(table)
    best = min(served, key=lambda one: one.token_ms)
    console.print(f"serve: {best.name}", highlight=False, soft_wrap=True)
