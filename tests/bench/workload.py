"""Workload: which models continue which prompts, and how far; the same for every method."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.config import Compile, Dtype, EngineConfig, ModelConfig, Speculation
from engine.models.registry import open_model

if TYPE_CHECKING:
    from cluster.config import RunAhead  # vLLM's environment has no Ray

SHARED = Path(__file__).parents[3] / "shared" / "data"
SEED = 20
NUM_PROMPTS = 32
MAX_PROMPT_TOKENS = 200
OWN_PROMPTS = (
    'def merge_intervals(intervals):\n    """Merge the intervals that overlap and return them sorted by start."""\n',
    "The harbour was quiet that morning, and nobody on the quay had noticed yet that the lighthouse had gone dark.",
    "A baker sells 36 rolls before noon and half as many after. Each roll costs 2 dollars. How much does she earn?",
    "Explain to a new colleague why a cache must be invalidated, and why that is harder than it sounds.",
    "class RateLimiter:\n    def __init__(self, rate, per):\n        self.rate = rate\n        self.per = per\n",
    "This proposal adds a statement to the language. It is motivated by code that is written today as follows:",
    "Compare a queue and a stack, and give one everyday example of each.",
    "It is said that the old road over the mountains was built in a single summer. The truth is longer.",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One corner of the comparison; batch_size is the number of concurrent streams where a method is served."""

    batch_size: int
    temperature: float


class Setting(NamedTuple):
    """What an arm of a comparison means."""

    num_speculative_tokens: int
    speculation: Speculation
    run_ahead: "RunAhead"

    @classmethod
    def of(cls, arm: str, k: int) -> "Setting":
        """Return the meaning of `plain`, `speculative`, `adaptive` or `fixed-K`; with `-run-ahead` behind it, or alone,
        the draft runs ahead.

        Raises:
            ValueError: there is no such arm.
        """
        run_ahead: RunAhead = "on" if arm.endswith("run-ahead") else "off"
        base = arm.removesuffix("run-ahead").removesuffix("-")
        prefix, _, length = base.partition("-")
        if base in ("", "speculative"):
            return cls(k, "fixed", run_ahead)
        if base == "adaptive":
            return cls(k, "adaptive", run_ahead)
        if base == "plain" and run_ahead == "off":
            return cls(0, "off", run_ahead)
        if prefix != "fixed" or not length.isdigit():
            raise ValueError(f"there is no arm {arm!r}")
        return cls(int(length), "fixed", run_ahead)


@dataclass(frozen=True, slots=True)
class Workload:
    """What every method is given. Prompts are token ids, and every one is continued by exactly `num_tokens` tokens."""

    target: str
    draft: str
    dtype: Dtype
    device: str
    compile: Compile
    num_threads: int
    prompts: list[list[int]]
    cells: list[Cell]
    num_tokens: int = 128
    num_speculative_tokens: int = 4
    head: str | None = None
    """A trained head of the target; None if none of the methods needs one."""
    num_turns: int | None = None
    """Batches of a cell; None is eight small ones, four large ones or two very large ones."""

    @property
    def max_num_seqs(self) -> int:
        """Requests in one round, at most: the default, or more where a batch is larger."""
        return max(EngineConfig().max_num_seqs, *(cell.batch_size for cell in self.cells))

    def batches(self, cell: Cell) -> list[list[list[int]]]:
        """Return the batches of a cell, one for each turn."""
        size = cell.batch_size
        count = self.num_turns or (8 if size <= 4 else 4 if size <= 32 else 2)
        endless = itertools.cycle(self.prompts)
        return [list(itertools.islice(endless, size)) for _ in range(count)]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Workload":
        fields = json.loads(text)
        return cls(**{**fields, "cells": [Cell(**cell) for cell in fields["cells"]]})


def read_prompts(target: str) -> list[list[int]]:
    """Return the prompts as the target's token ids: a third each of code, questions and word problems."""
    tokenizer = open_model(ModelConfig(target)).tokenizer
    ids = [tokenizer.encode(text)[:MAX_PROMPT_TOKENS] for text in _texts()]
    return ids[:NUM_PROMPTS]


def _texts() -> Sequence[str]:
    if not SHARED.is_dir():
        return OWN_PROMPTS
    rng = random.Random(SEED)
    sources = [
        [record["prompt"] for record in records("humaneval")],
        [record["turns"][0] for record in records("mt_bench")],
        [record["question"] for record in records("gsm8k")],
    ]
    drawn = [rng.sample(texts, -(-NUM_PROMPTS // len(sources))) for texts in sources]
    return list(itertools.chain.from_iterable(zip(*drawn, strict=True)))


def records(name: str) -> Iterator[dict[str, Any]]:
    for line in (SHARED / "prompts" / f"{name}.jsonl").read_text().splitlines():
        yield json.loads(line)
