"""`evaluate`: the acceptance of a pair, as tables and JSON; `comparison` measures times."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from engine.config import BUNDLED_TARGET, ModelConfig
from engine.heads.registry import load_head
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


@dataclass(frozen=True)
class Evaluation:
    """The measurements of a pair: acceptance by temperature, nats per token, and the acceptance of heads."""

    acceptance: dict[float, Acceptance]
    held_out_loss: float | None
    heads: dict[str, dict[float, Acceptance]] = field(default_factory=dict)


def read_tasks(path: Path) -> dict[str, list[str]]:
    """Read prompts by task: from JSON lines with a `prompt` each, else paragraphs; without a `task` it is "all"."""
    text = read_text(path)
    try:
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
            prompts = [(str(line.get("task", "all")), line["prompt"]) for line in lines]
        else:
            prompts = [("all", block.strip("\n")) for block in text.split("\n\n") if block.strip()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{path} is not JSON lines with a prompt each: {error!r}") from error
    if not prompts:
        raise TrainingError(f"no prompts in {path}")
    tasks: dict[str, list[str]] = {}
    for task, prompt in prompts:
        tasks.setdefault(task, []).append(prompt)
    return tasks


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of all tasks."""
    return [prompt for prompts in read_tasks(path).values() for prompt in prompts]


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
    return Evaluation(acceptance, loss, of_heads)


def show(evaluation: Evaluation, k: int, console: Console) -> None:
    """Print acceptance and held-out loss."""
    console.print(acceptance_table(evaluation.acceptance, k, f"Draft tokens accepted, k = {k}"))
    for name, acceptance_of_head in evaluation.heads.items():
        console.print(acceptance_table(acceptance_of_head, k, f"Draft tokens of {name} accepted, k = {k}"))
    if (loss := evaluation.held_out_loss) is not None:
        console.print(f"held-out loss {loss:.3f} nats/token", highlight=False)


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
        "held_out_loss": None if evaluation.held_out_loss is None else round(evaluation.held_out_loss, 4),
    }
    write_whole(path, (json.dumps(figures, indent=2) + "\n").encode())
