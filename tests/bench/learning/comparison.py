"""The command `learning`: a draft of novels meets PEPs and then SQL; the bundled draft meets its own texts."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from engine.config import BUNDLED_DRAFT
from engine.llm import LLM
from engine.protocols import Request
from tests.bench.learning.curve import Follower, Window
from tests.bench.learning.picture import draw
from tests.bench.learning.traffic import make_novels_draft, write
from tests.bench.workload import SHARED

TRAFFIC = {"novels": 25_000, "peps": 200_000, "sql": 50_000}
"""Tokens of each domain, in this order."""
HELD_OUT_TOKENS = 10_000
"""Of each domain, and never met."""
K = 4
_HELD_OUT_SEED = 10**6


def learning(options: Namespace, console: Console) -> list[str]:
    """Measure and print; returns what went wrong."""
    if not SHARED.is_dir():
        return [f"{SHARED} is not there, whose novels and PEPs are the traffic"]
    if options.learned is not None and options.learned.exists():
        return [f"--learned is {options.learned}, which is there: learning would go on from it; remove it"]
    torch.set_num_threads(1)  # as in the thread that learns
    with TemporaryDirectory(prefix="paceline-learning-") as folder:
        draft = options.draft or Path(folder)
        if not (draft / "config.json").exists():
            make_novels_draft(draft, console)
        llm = LLM("auto", "none", max_num_seqs=64)
        held_out = {domain: write(llm, domain, HELD_OUT_TOKENS, _HELD_OUT_SEED) for domain in TRAFFIC}
        follower = Follower(draft, K, options.learned)
        windows = _follow(follower, "a draft of novels", TRAFFIC, llm, held_out, console)
        if options.svg is not None:
            draw(windows, options.svg)
        _follow(Follower(BUNDLED_DRAFT, K), "the bundled draft", {"peps": TRAFFIC["sql"]}, llm, held_out, console)
    return []


def _follow(
    follower: Follower,
    name: str,
    traffic: Mapping[str, int],
    llm: LLM,
    held_out: Mapping[str, Sequence[Request]],
    console: Console,
) -> list[Window]:
    """Let a draft learn from some traffic, and print tokens a pass over those of the frozen draft."""
    windows = list[Window]()
    table = Table(title=f"{name}: tokens a pass while it learns, over those of the frozen draft")
    headings = ("after", "tokens", "its last window", *(f"other {domain}" for domain in held_out), "swaps")
    for heading in headings:
        table.add_column(heading, justify="right")
    for nth, (domain, num_tokens) in enumerate(traffic.items()):
        seen = windows[-1].num_tokens if windows else 0
        for window in follower.meet(domain, write(llm, domain, num_tokens, nth * num_tokens), seen):
            windows.append(window)
            console.print(window, markup=False)
        gains = [f"{follower.gain(texts):.2f}" for texts in held_out.values()]
        swaps = sum(window.num_swaps for window in windows)
        table.add_row(domain, f"{windows[-1].num_tokens:,}", f"{windows[-1].gain:.2f}", *gains, str(swaps))
    console.print(table)
    console.print({name: round(count, 2) for name, count in follower.study.counts.items()})
    return windows
