"""Traffic: a draft that knows novels alone, and texts that the bundled target writes in three domains."""

import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET
from engine.llm import LLM
from engine.params import SamplingParams
from engine.protocols import Request
from engine.training.checkpoint import save_model
from engine.training.corpus import read_corpus
from engine.training.distill import DistillOptions, distill
from engine.training.loop import Plan
from engine.training.small_model import load_model
from tests.bench.workload import SHARED

NOVELS = ("moby-dick", "dracula", "frankenstein", "pride-and-prejudice")
TEXT_TOKENS = 192
TEMPERATURE = 0.7
_PROMPT_CHARACTERS = 240
_PROMPT_TOKENS = 48
_STEPS = 90
"""Of distillation on novels alone."""
_TABLES = ("orders", "customers", "invoices", "shipments", "employees", "products", "events", "sessions")
_COLUMNS = ("id", "name", "price", "created_at", "status", "city", "quantity", "customer_id", "total", "country")


def make_novels_draft(output: Path, console: Console) -> None:
    """Make the bundled draft forget most of what it knows, and teach it novels alone."""
    model, tokenizer = load_model(BUNDLED_DRAFT, torch.device("cpu"))
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(0.8).add_(0.6 * weight.std() * torch.randn(weight.shape, generator=chance))
    options = DistillOptions(continuations=128, lr_scale=0.3)
    with TemporaryDirectory(prefix="paceline-draft-") as start:
        save_model(Path(start), model, tokenizer)
        distill(_files(NOVELS), BUNDLED_TARGET, Path(start), output, options, Plan(_STEPS), console)


def write(llm: LLM, domain: str, num_tokens: int, seed: int) -> list[Request]:
    """Return texts of the target, `TEXT_TOKENS` long, as ended requests that may teach."""
    count = -(-num_tokens // TEXT_TOKENS)
    prompts = read_beginnings(domain, count, llm.tokenizer, seed)
    params = [
        SamplingParams(temperature=TEMPERATURE, seed=seed + nth, max_tokens=TEXT_TOKENS, ignore_eos=True)
        for nth in range(count)
    ]
    requests = []
    for nth, output in enumerate(llm.generate(prompts, params, show_progress=False)):
        learned = SamplingParams(temperature=TEMPERATURE, seed=seed + nth, ignore_eos=True, learning_group="")
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        requests.append(Request(f"{domain}-{seed}-{nth}", ids, len(output.prompt_token_ids), learned))
    return requests


def read_beginnings(domain: str, count: int, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> list[list[int]]:
    """Return prompts as token ids, each from somewhere else."""
    return [tokenizer.encode(text)[:_PROMPT_TOKENS] for text in _texts(domain, count, seed)]


def _texts(domain: str, count: int, seed: int) -> list[str]:
    chance = random.Random(f"{domain} {seed}")
    if domain == "sql":
        return [_statement(chance) for _ in range(count)]
    pieces = [piece.text for piece in read_corpus(_files(NOVELS if domain == "novels" else ("peps",))).training]
    beginnings = []
    for _ in range(count):
        piece = chance.choice(pieces)
        start = chance.randrange(max(1, len(piece) - _PROMPT_CHARACTERS))
        beginnings.append(piece[start : start + _PROMPT_CHARACTERS])
    return beginnings


def _statement(chance: random.Random) -> str:
    table, other = chance.sample(_TABLES, 2)
    columns = chance.sample(_COLUMNS, 4)
    return (
        f"SELECT {table}.{columns[0]}, {other}.{columns[1]} FROM {table}\n"
        f"    JOIN {other} ON {table}.id = {other}.{columns[2]}\n"
        f"    WHERE {columns[3]} > {chance.randrange(1000)} ORDER BY {columns[0]};\n\nSELECT "
    )


def _files(names: Sequence[str]) -> list[Path]:
    return [SHARED / "corpus" / f"{name}.txt.gz" for name in names]
