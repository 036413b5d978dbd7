"""A small corpus, and a target and a draft trained on it in a second."""

import io
import random
from pathlib import Path

import pytest
from rich.console import Console

from engine.training.loop import Plan
from engine.training.pretrain import PretrainOptions, pretrain
from engine.training.small_model import Size

WORDS = "the whale swam past a ship and every sailor saw it rise from sea to sky before night fell".split()  # noqa: SIM905
TINY = Size(layers=2, hidden=32, intermediate=64, heads=1, kv_heads=1, context=64)
OPTIONS = PretrainOptions(size=TINY, vocab_size=300, batch_tokens=128, length=32)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    paragraphs = [" ".join(rng.choices(WORDS, k=40)) + "." for _ in range(60)]
    path = tmp_path_factory.mktemp("corpus") / "book.txt"
    path.write_text("\n\n".join(paragraphs))
    return path


@pytest.fixture(scope="session")
def target(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    pretrain([corpus], folder, OPTIONS, Plan(steps=30, lr_warmup=5), Console(file=io.StringIO()))
    return folder
