"""Workload: which models continue which prompts, and how far; the same for every method."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from engine.config import Compile, Dtype, EngineConfig, ModelConfig, Speculation
from engine.models.registry import open_model
from engine.protocols import Overlap

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


OVERLAPS: dict[str, tuple[Overlap, ...]] = {
    "in-turn": ("none",),
    "run-ahead": ("ahead",),
    "alternate": ("alternate",),
    "any": ("none", "ahead", "alternate"),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """How a group decodes: who chooses the length of drafts, how long they are, and what overlaps a verification."""

    name: str
    k: int
    speculation: Speculation
    overlaps: tuple[Overlap, ...] = ("none",)

    @classmethod
    def of(cls, name: str, k: int) -> Self:
        """Return the arm `plain`, or `speculative`, `adaptive` or `fixed-K`, or one of these with `-run-ahead`,
        `-alternate` or `-any` behind it; the last three alone mean `speculative`.

        Raises ValueError if there is no such arm.
        """
        overlap = next((word for word in OVERLAPS if name.endswith(word)), "in-turn")
        base = name.removesuffix(overlap).removesuffix("-") or "speculative"
        prefix, _, length = base.partition("-")
        if base == "plain" and overlap == "in-turn":
            return cls(name, 0, "off")
        if base in ("speculative", "adaptive"):
            return cls(name, k, "fixed" if base == "speculative" else "adaptive", OVERLAPS[overlap])
        if prefix != "fixed" or not length.isdigit():
            raise ValueError(f"there is no arm {name!r}")
        return cls(name, int(length), "fixed", OVERLAPS[overlap])

    @property
    def runs_ahead(self) -> bool:
        return "ahead" in self.overlaps

    @property
    def settings(self) -> dict[str, object]:
        """The served application's; ValueError if it has none for this arm, since it chooses by itself to alternate."""
        if "alternate" in self.overlaps:
            raise ValueError(f"a server cannot be told to decode as arm {self.name!r}")
        run_ahead = "on" if self.runs_ahead else "off"
        return {"num_speculative_tokens": self.k, "speculation": self.speculation, "run_ahead": run_ahead}


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
