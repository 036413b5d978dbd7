"""`evaluate`: acceptance, step times and predicted speed-up of a pair, as tables, a chart and JSON."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.config import ModelConfig
from engine.models.tokenizer import check_same_vocabulary
from engine.training.acceptance import CONTINUATION_TOKENS, TEMPERATURES, Acceptance, continue_prompts
from engine.training.checkpoint import write_whole
from engine.training.corpus import read_corpus, read_text
from engine.training.cost import decode_step_ms
from engine.training.errors import TrainingError
from engine.training.models import load_model
from engine.training.pretrain import TRAINING_RECORD, held_out_loss
from engine.training.speedup import best, predict

PAIR = Path(__file__).parent.parent / "pair"
BUNDLED_TARGET = PAIR / "target"
BUNDLED_DRAFT = PAIR / "draft"
BUNDLED_PROMPTS = PAIR / "prompts.txt"
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Evaluation:
    """What was measured of a pair."""

    acceptance: dict[float, Acceptance]
    t_draft_ms: float
    t_target_ms: float
    held_out_loss: float | None

    @property
    def cost_ratio(self) -> float:
        """C = t_draft / t_target."""
        return self.t_draft_ms / self.t_target_ms

    def as_json(self, k: int) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "temperatures": {
                f"{temperature:g}": {
                    "acceptance_per_position": [round(rate, 4) for rate in acceptance.per_position(k)],
                    "mean_acceptance_length": round(acceptance.mean_acceptance_length(k), 4),
                }
                for temperature, acceptance in self.acceptance.items()
            },
            "t_draft_ms": round(self.t_draft_ms, 4),
            "t_target_ms": round(self.t_target_ms, 4),
            "held_out_loss": None if self.held_out_loss is None else round(self.held_out_loss, 4),
        }


def read_prompts(path: Path) -> list[str]:
    """Read prompts from JSON lines with a `prompt` each, or from plain text with blank lines between prompts."""
    text = read_text(path)
    try:
        if path.suffix == ".jsonl":
            prompts = [json.loads(line)["prompt"] for line in text.splitlines() if line.strip()]
        else:
            prompts = [block.strip("\n") for block in text.split("\n\n") if block.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path} is not JSON lines with a prompt each: {error!r}") from error
    if not prompts:
        raise TrainingError(f"no prompts in {path}")
    return prompts


def evaluate(target_folder: Path, draft_folder: Path, prompts: list[str], corpus: list[Path]) -> Evaluation:
    """Measure a pair; without a corpus, the held-out loss is read from the target's training record."""
    target, tokenizer = load_model(target_folder)
    draft, _ = load_model(draft_folder)
    check_same_vocabulary(ModelConfig(str(target_folder)), ModelConfig(str(draft_folder)))
    context = min(model.config.max_position_embeddings for model in (target, draft))
    num_new = min(CONTINUATION_TOKENS, context // 2)
    room = min(PROMPT_TOKENS, context - num_new)
    encoded = [tokenizer(prompt)["input_ids"][-room:] for prompt in prompts]
    acceptance = {t: continue_prompts(target, encoded, num_new, t).acceptance(draft) for t in TEMPERATURES}
    measured = held_out_loss(target, tokenizer, read_corpus(corpus).held_out) if corpus else None
    loss = measured or _recorded_loss(target_folder)
    t_draft_ms, t_target_ms = decode_step_ms([draft_folder, target_folder])
    return Evaluation(acceptance, t_draft_ms, t_target_ms, loss)


def _recorded_loss(target_folder: Path) -> float | None:
    path = target_folder / TRAINING_RECORD
    if not path.is_file():
        return None
    loss: float | None = json.loads(read_text(path)).get("held_out_loss")
    return loss


def show(evaluation: Evaluation, k: int, console: Console) -> None:
    """Print acceptance, step times and the predicted speed-up for each k."""
    accepted = Table(title=f"Draft tokens accepted, k = {k}")
    for heading in ("temperature", *(f"position {i}" for i in range(1, k + 1)), "mean acceptance length"):
        accepted.add_column(heading, justify="right")
    for temperature, acceptance in evaluation.acceptance.items():
        rates = [f"{rate:.3f}" for rate in acceptance.per_position(k)]
        accepted.add_row(f"{temperature:g}", *rates, f"{acceptance.mean_acceptance_length(k):.2f}")
    console.print(accepted)
    loss = evaluation.held_out_loss
    console.print(
        f"t_draft {evaluation.t_draft_ms:.2f} ms, t_target {evaluation.t_target_ms:.2f} ms, "
        f"cost ratio {evaluation.cost_ratio:.3f}"
        + (f", held-out loss {loss:.3f} nats/token" if loss is not None else ""),
        highlight=False,
    )
    console.print(_speedup_table(evaluation))


def _speedup_table(evaluation: Evaluation) -> Table:
    table = Table(title="Predicted speed-up over plain decoding, drafting in turn | ahead; the best k in bold")
    table.add_column("k", justify="right")
    predictions = {t: predict(a, evaluation.cost_ratio) for t, a in evaluation.acceptance.items()}
    for temperature in predictions:
        table.add_column(f"temperature {temperature:g}", justify="right")
    for rows in zip(*predictions.values(), strict=True):
        cells = []
        for row, column in zip(rows, predictions.values(), strict=True):
            cell = f"{row.speedup:.2f} | {row.run_ahead_bound:.2f}"
            cells.append(f"[bold]{cell}[/bold]" if row is best(column) else cell)
        table.add_row(str(rows[0].k), *cells)
    return table


def draw_chart(evaluation: Evaluation, path: Path) -> None:
    """Draw predicted speed-up against k as a PNG."""
    # Imported here, because it takes a second that the other commands should not wait.
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (temperature, acceptance) in enumerate(evaluation.acceptance.items()):
        predictions = predict(acceptance, evaluation.cost_ratio)
        ks = [p.k for p in predictions]
        top = best(predictions)
        axes.plot(ks, [p.speedup for p in predictions], color=f"C{i}", label=f"temperature {temperature:g}")
        axes.plot(ks, [p.run_ahead_bound for p in predictions], color=f"C{i}", linestyle=":")
        axes.plot(top.k, top.speedup, "o", color=f"C{i}")
    axes.set(xlabel="k, draft tokens per round", ylabel="predicted speed-up over plain decoding")
    axes.set_title(f"solid: drafting in turn, dotted: run-ahead bound; c = {evaluation.cost_ratio:.2f}", fontsize=10)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_whole(path, buffer.getvalue())


def write_json(evaluation: Evaluation, k: int, path: Path) -> None:
    """Write the figures as JSON."""
    write_whole(path, (json.dumps(evaluation.as_json(k), indent=2) + "\n").encode())
