"""The command `twin`: measures parts in virtual time, and prints their tables."""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
from rich.console import Console

from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET, ModelConfig
from engine.drafting.learning.learner import Learner
from engine.drafting.learning.study import Study
from engine.errors import ConfigError
from engine.models.registry import open_model
from tests.bench import paced_device
from tests.bench.learning.traffic import read_beginnings
from tests.bench.paced.group import Models
from tests.bench.paced.light_pair import make_light_pair
from tests.bench.paced.virtual.learning import learning
from tests.bench.paced.virtual.measures import Bench, hidden, lead, pools
from tests.bench.paced.virtual.report import show_hidden, show_leads, show_learning, show_pools
from tests.bench.workload import NUM_PROMPTS, read_prompts

T = TypeVar("T")

PAIRS = ("h100x4-70b+h100-1b", "h100-8b+h100-1b")
TEMPERATURE = 0.7
FIXED = ("plain", "fixed-2", "fixed-4", "fixed-2-run-ahead", "fixed-4-run-ahead", "fixed-4-alternate")
"""What `adaptive` is compared with: lengths and overlaps that somebody could have set."""
MIXED_K = 8
"""The longest draft of the mixed load."""


def twin(options: Namespace, console: Console) -> list[str]:
    """Measure the chosen parts."""
    torch.set_num_threads(1)  # the passes are small
    logging.getLogger(paced_device.__name__).setLevel(logging.ERROR)  # each backend says that it is paced
    with TemporaryDirectory(prefix="paceline-pair-") as folder:
        target, draft = map(str, make_light_pair(Path(folder)))
        models, prompts = Models.load(target, draft), read_prompts(target)
        bench = Bench(models, prompts, num_warm=options.warm, num_tokens=options.num_tokens)
        for part in options.parts:
            PARTS[part](options, bench, console)
    return []


def _hidden(options: Namespace, bench: Bench, console: Console) -> None:
    show_hidden(list(_said(hidden(bench, options.pairs, options.rows, TEMPERATURE), console)), console)


def _adaptive(options: Namespace, bench: Bench, console: Console) -> None:
    leads = (
        lead(bench, pair, rows, [TEMPERATURE], "adaptive-any", FIXED, range(options.seeds))
        for pair in options.pairs
        for rows in options.rows
    )
    title = "adaptive over the best fixed length and overlap, off included"
    show_leads(title, list(_said(leads, console)), console)


def _mixed(options: Namespace, bench: Bench, console: Console) -> None:
    """Half of the rows repeat what they read, half write freely: by the bundled pair, at T = 0 and 1."""
    paths = str(BUNDLED_TARGET), str(BUNDLED_DRAFT)
    prompts = read_prompts(paths[0])
    half = len(prompts) // 2
    # Each kind at each temperature, since rows get prompts and the temperatures 0 and 1 in turn.
    repeating = [(prompt[:40] * 4)[:150] for prompt in prompts[:half]]
    mixed = [
        prompt
        for index in range(0, half - 1, 2)
        for prompt in (*repeating[index : index + 2], *prompts[half + index : half + index + 2])
    ]
    ours = Bench(Models.load(*paths), mixed, k=MIXED_K, num_warm=bench.num_warm, num_tokens=bench.num_tokens)
    others, seeds = [f"fixed-{k}" for k in (1, 2, 3, 4, 6, 8)], range(options.seeds)
    leads = (lead(ours, pair, 16, [0.0, 1.0], "adaptive", others, seeds, "model+suffix") for pair in options.pairs)
    show_leads("a mixed load: budgets per row over one k for all", list(_said(leads, console)), console)


def _pool(options: Namespace, bench: Bench, console: Console) -> None:
    places = pools(bench, options.pairs[0], options.rows[0], TEMPERATURE, options.groups)
    show_pools(list(_said(places, console)), console)


def _learning(options: Namespace, bench: Bench, console: Console) -> None:
    """By the bundled target and --draft, on PEPs."""
    target, draft = str(BUNDLED_TARGET), str(options.draft)
    if options.learned is None or not options.learned.is_file():
        raise ConfigError(f"--learned is {options.learned}; it must be a file that `learning --draft --learned` wrote")
    source = open_model(ModelConfig(draft))
    prompts = read_beginnings("peps", NUM_PROMPTS, source.tokenizer)
    ours = Bench(Models.load(target, draft), prompts, num_warm=bench.num_warm, num_tokens=bench.num_tokens)
    learner = Learner(ours.models.draft, ours.k)
    learned = Study(learner, path=options.learned, draft=source.digest).offer
    assert learned is not None
    group = {"rows": 8, "temperatures": [TEMPERATURE], "place": "pool", "num_groups": 4}
    settings = ({"pair": options.pairs[0], "name": "run-ahead", "seed": seed} | group for seed in range(options.seeds))
    arms = (arm for setting in settings for arm in learning(ours, setting, learner.loaded, learned))
    show_learning(list(_said(arms, console)), console)


def _said(results: Iterable[T], console: Console) -> Iterator[T]:
    """Print each result as soon as it is there: all of them take minutes."""
    for result in results:
        console.print(result, markup=False)
        yield result


PARTS: Mapping[str, Callable[[Namespace, Bench, Console], None]] = {
    "hidden": _hidden,
    "adaptive": _adaptive,
    "mixed": _mixed,
    "pool": _pool,
    "learning": _learning,
}
