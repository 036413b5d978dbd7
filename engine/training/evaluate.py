"""`evaluate`: acceptance, step times and predicted speed-up of a pair, as tables and JSON.

`c` is t_draft / t_target, `alpha` the probability that a draft token is accepted, `k` the number of draft tokens.

- Leviathan, Kalman and Matias (https://arxiv.org/abs/2211.17192), Theorem 3.8, assumes that tokens are accepted
  independently, and that a target pass over k + 1 tokens takes as long as over one token.
- The run-ahead bound assumes that the target's pass hides drafting while k + 1 draft steps fit into it.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from engine.config import BUNDLED_TARGET, ModelConfig
from engine.control.judge import speed_up
from engine.execution.batch import build
from engine.execution.forward_row import ForwardRow
from engine.execution.registry import make_backend
from engine.heads.registry import load_head
from engine.models import loader
from engine.models.registry import open_model
from engine.training.checkpoint import TrainingError, write_whole
from engine.training.corpus import read_corpus, read_text
from engine.training.head_training import head_acceptance
from engine.training.measured_acceptance import (
    CONTINUATION_TOKENS,
    TEMPERATURES,
    Acceptance,
    acceptance_table,
    check_same_vocabulary,
    continue_prompts,
)
from engine.training.pretrain import TRAINING_RECORD, held_out_loss
from engine.training.small_model import load_model

BUNDLED_PROMPTS = BUNDLED_TARGET.parent / "prompts.txt"
PROMPT_TOKENS = 256
MAX_K = 12
CONTEXT_TOKENS = 256
_BLOCK_SIZE = 16
_REPEATS = 50


@dataclass(frozen=True)
class Evaluation:
    """The measurements of a pair: acceptance by temperature, milliseconds per step, nats per token."""

    acceptance: dict[float, Acceptance]
    t_draft_ms: float
    t_target_ms: float
    held_out_loss: float | None
    heads: dict[str, dict[float, Acceptance]] = field(default_factory=dict)

    @property
    def cost_ratio(self) -> float:
        return self.t_draft_ms / self.t_target_ms


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


def read_tasks(path: Path) -> dict[str, list[str]]:
    """Read prompts by the `task` of their JSON line; prompts without a task are the task "all"."""
    tasks: dict[str, list[str]] = {}
    is_json, text = path.suffix == ".jsonl", read_text(path)
    names = [json.loads(line).get("task", "all") for line in text.splitlines() if line.strip()] if is_json else []
    for i, prompt in enumerate(read_prompts(path)):
        tasks.setdefault(str(names[i]) if is_json else "all", []).append(prompt)
    return tasks


def evaluate(
    target_folder: Path, draft_folder: Path, prompts: list[str], corpus: list[Path], heads: Sequence[Path] = ()
) -> Evaluation:
    """Measure a pair; without a corpus, the held-out loss is read from the target's training record."""
    target, tokenizer = load_model(target_folder)
    draft, _ = load_model(draft_folder)
    check_same_vocabulary(target_folder, draft_folder)
    context = min(model.config.max_position_embeddings for model in (target, draft))
    num_new = min(CONTINUATION_TOKENS, context // 2)
    room = min(PROMPT_TOKENS, context - num_new)
    encoded = [tokenizer(prompt)["input_ids"][-room:] for prompt in prompts]
    continued = {t: continue_prompts(target, encoded, num_new, t) for t in TEMPERATURES}
    acceptance = {t: text.acceptance(draft) for t, text in continued.items()}
    of_heads: dict[str, dict[float, Acceptance]] = {}
    for folder in heads:
        source, target_source = (open_model(ModelConfig(str(path))) for path in (folder, target_folder))
        head = load_head(source, target_source, target, target.device, torch.float32, 0)
        of_heads[str(folder)] = {t: head_acceptance(head, target, text, MAX_K) for t, text in continued.items()}
    loss, record = None, target_folder / TRAINING_RECORD
    if corpus:
        loss = held_out_loss(target, tokenizer, read_corpus(corpus).held_out)
    elif record.is_file():
        loss = json.loads(read_text(record)).get("held_out_loss")
    t_draft_ms, t_target_ms = decode_step_ms([draft_folder, target_folder])
    return Evaluation(acceptance, t_draft_ms, t_target_ms, loss, of_heads)


def decode_step_ms(folders: list[Path]) -> list[float]:
    """Return each model's median decode step after 256 tokens; models take turns, so other load slows all alike."""
    steps = [_DecodeStep(folder) for folder in folders]
    times = [[step.time_ms() for step in steps] for _ in range(_REPEATS)]
    return [statistics.median(step_times) for step_times in zip(*times, strict=True)]


class _DecodeStep:
    def __init__(self, folder: Path) -> None:
        source = open_model(ModelConfig(str(folder), compile="auto"))
        self.backend = make_backend(loader.load_model(source), source)
        self.backend.warm_up(compile_missing=False)
        context = min(CONTEXT_TOKENS, self.backend.info.max_model_len - 1)
        blocks = list(range(context // _BLOCK_SIZE + 1))
        kv = self.backend.allocate_kv(len(blocks), _BLOCK_SIZE)
        self.backend.run(build([ForwardRow([1] * context, 0, blocks, 1)], kv))
        # Running it repeatedly writes the same keys and values to the same slot.
        self.batch = build([ForwardRow([1], context, blocks, 1)], kv)
        self.time_ms()

    def time_ms(self) -> float:
        started = time.perf_counter()
        self.backend.run(self.batch)
        self.backend.wait()
        return 1000 * (time.perf_counter() - started)


def show(evaluation: Evaluation, k: int, console: Console) -> None:
    """Print acceptance, step times and the predicted speed-up for each k."""
    console.print(acceptance_table(evaluation.acceptance, k, f"Draft tokens accepted, k = {k}"))
    for name, acceptance_of_head in evaluation.heads.items():
        console.print(acceptance_table(acceptance_of_head, k, f"Draft tokens of {name} accepted, k = {k}"))
    loss = evaluation.held_out_loss
    console.print(
        f"t_draft {evaluation.t_draft_ms:.2f} ms, t_target {evaluation.t_target_ms:.2f} ms, "
        f"cost ratio {evaluation.cost_ratio:.3f}"
        + (f", held-out loss {loss:.3f} nats/token" if loss is not None else ""),
        highlight=False,
    )
    alphas = {temperature: acceptance.rate() for temperature, acceptance in evaluation.acceptance.items()}
    console.print(_speedup_table(alphas, evaluation.cost_ratio))


def expected_length(alpha: float, k: int) -> float:
    """Return tokens per round under independent acceptance: (1 - alpha^(k + 1)) / (1 - alpha)."""
    return float(k + 1) if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def theorem_3_8(alpha: float, k: int, c: float) -> float:
    """Return the speed-up over plain decoding when draft and target take turns."""
    tokens = expected_length(alpha, k)
    return speed_up(tokens, tokens - 1, 1 + k * c, 1.0)


def run_ahead_bound(alpha: float, k: int, c: float) -> float:
    """Return the speed-up over plain decoding if drafting runs while the target verifies."""
    tokens = expected_length(alpha, k)
    return speed_up(tokens, tokens - 1, max(1.0, (k + 1) * c), 1.0)


def _speedup_table(alphas: dict[float, float], c: float) -> Table:
    table = Table(title="Predicted speed-up over plain decoding, drafting in turn | ahead; the best k in bold")
    lengths = range(1, MAX_K + 1)
    best = {alpha: max(lengths, key=lambda k: theorem_3_8(alpha, k, c)) for alpha in alphas.values()}
    for heading in ("k", *(f"temperature {temperature:g}" for temperature in alphas)):
        table.add_column(heading, justify="right")
    for k in lengths:
        cells = []
        for alpha in alphas.values():
            cell = f"{theorem_3_8(alpha, k, c):.2f} | {run_ahead_bound(alpha, k, c):.2f}"
            cells.append(f"[bold]{cell}[/bold]" if k == best[alpha] else cell)
        table.add_row(str(k), *cells)
    return table


def write_json(evaluation: Evaluation, k: int, path: Path) -> None:
    """Write the figures as JSON."""

    def by_temperature(measured: dict[float, Acceptance]) -> dict[str, object]:
        return {
            f"{temperature:g}": {
                "acceptance_per_position": [round(rate, 4) for rate in acceptance.per_position(k)],
                "mean_acceptance_length": round(acceptance.mean_acceptance_length(k), 4),
            }
            for temperature, acceptance in measured.items()
        }

    figures: dict[str, object] = {
        "temperatures": by_temperature(evaluation.acceptance),
        **(
            {"heads": {name: by_temperature(head) for name, head in evaluation.heads.items()}}
            if evaluation.heads
            else {}
        ),
        "t_draft_ms": round(evaluation.t_draft_ms, 4),
        "t_target_ms": round(evaluation.t_target_ms, 4),
        "held_out_loss": None if evaluation.held_out_loss is None else round(evaluation.held_out_loss, 4),
    }
    write_whole(path, (json.dumps(figures, indent=2) + "\n").encode())
