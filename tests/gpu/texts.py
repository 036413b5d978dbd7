"""Texts: the bundled pair on the device against the CPU, and drafts against no drafts.

In float32 every text must be that of the CPU. In bfloat16 two tokens with almost equal scores may change places between
a pass over one row and a pass over five: such flips are counted.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.config import EngineConfig, make_pair
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.execution.backend import Backend
from engine.execution.registry import make_backend
from engine.models.loader import load_model
from engine.models.registry import open_model
from engine.params import SamplingParams
from engine.protocols import Drafter, NoDrafter
from tests.bench.workload import OWN_PROMPTS
from tests.engine.running import drafters, make_engine, run
from tests.fakes import InterruptedDrafter

PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.3),
    SamplingParams(temperature=0.8, top_k=40, min_p=0.02),
)
BATCH_SIZES = (1, 8)
NUM_PROMPTS = 4
_NUM_BLOCKS = 2048
_DRY_TOKENS = 2
"""A dry run's tokens; it continues one prompt only."""

Texts = list[list[int]]
MakeDrafter = Callable[[EngineConfig], Drafter]


@dataclass(frozen=True, slots=True)
class Pair:
    """The bundled pair on one device."""

    target: Backend
    draft: Backend


def load_pair(device: str, dtype: str) -> Pair:
    """Load both bundled models, which run eagerly on a CPU."""
    pair = make_pair(
        device=device,
        dtype=dtype,
        compile="off" if device == "cpu" else "auto",
        num_threads=min(2, torch.get_num_threads()),
    )
    assert pair.draft is not None
    target, draft = (open_model(config) for config in (pair.target, pair.draft))
    return Pair(make_backend(load_model(target), target), make_backend(load_model(draft), draft))


def ways_to_draft(pair: Pair) -> dict[str, MakeDrafter]:
    made = drafters(pair.target, pair.draft, tokens=range(2, 200))
    return {
        "no draft": lambda _: NoDrafter(),
        "draft": made["a random draft"],
        "target as its own draft": made["the target itself"],
        "running ahead": lambda config: InterruptedDrafter(RunAheadDrafter(DraftModel(pair.draft), config)),
        "trees": made["trees"],
    }


def equal_texts(device: str, *, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield, in float32, how many texts of each way to draft differ from the CPU's."""
    reference, pair = load_pair("cpu", "float32"), load_pair(device, "float32")
    # A coupled text depends on the target alone; a text under the rejection rule depends on the draft as well.
    for verification, expected_by in (("coupled", "no draft"), ("rejection", "draft")):
        expected_drafter = ways_to_draft(reference)[expected_by]
        settings = {"num_tokens": num_tokens, "verification": verification}
        expected = generate(reference, expected_drafter, batch_size=1, **settings)
        for name, make in ways_to_draft(pair).items():
            for batch_size in BATCH_SIZES if verification == "coupled" or name == expected_by else ():
                texts = generate(pair, make, batch_size=batch_size, **settings)
                yield {"arm": f"{verification}, {name}, batch {batch_size}", **difference(expected, texts)}


def flips(device: str, *, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield, in bfloat16, how many texts change with drafts, with the batch, and when tokens are computed again."""
    pair = load_pair(device, "bfloat16")
    make = ways_to_draft(pair)
    plain = generate(pair, make["no draft"], batch_size=1, num_tokens=num_tokens)
    few_blocks = {"num_blocks": 8 + num_tokens // 4, "enable_prefix_caching": False}
    arms: dict[str, tuple[str, dict[str, Any]]] = {
        "draft": ("draft", {"batch_size": 1}),
        "batch 8": ("no draft", {"batch_size": 8}),
        "draft, batch 8": ("draft", {"batch_size": 8}),
        "trees, batch 8": ("trees", {"batch_size": 8}),
        "prompts in pieces of 24 tokens": ("no draft", {"batch_size": 8, "max_num_batched_tokens": 24}),
        "draft, preempted": ("draft", {"batch_size": 8, **few_blocks}),
    }
    for name, (drafter, settings) in arms.items():
        yield {"arm": name, **difference(plain, generate(pair, make[drafter], num_tokens=num_tokens, **settings))}


def generate(pair: Pair, drafter: MakeDrafter, *, batch_size: int, num_tokens: int, **settings: Any) -> Texts:
    """Continue every prompt with every set of parameters, `batch_size` requests at a time."""
    tokenizer = open_model(make_pair().target).tokenizer
    requests = [
        (tokenizer.encode(prompt), replace(params, seed=i, max_tokens=num_tokens, ignore_eos=True))
        for i, prompt in enumerate(OWN_PROMPTS[: NUM_PROMPTS if num_tokens > _DRY_TOKENS else 1])
        for params in PARAMS
    ]
    defaults = {"num_speculative_tokens": 4, "num_blocks": _NUM_BLOCKS, "max_num_seqs": batch_size}
    engine = make_engine(pair.target, drafter, **(defaults | settings))
    pair.target.warm_up()
    pair.draft.warm_up()
    return list(run(engine, requests).values())


def difference(expected: Texts, texts: Texts) -> dict[str, Any]:
    """Return how many texts differ, how many tokens were compared until then, and where the texts part."""
    parted = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        for one, other in zip(expected, texts, strict=True)
    ]
    compared = sum(len(one) if at is None else at + 1 for one, at in zip(expected, parted, strict=True))
    places = {i: at for i, at in enumerate(parted) if at is not None}
    return {"texts": len(texts), "different": len(places), "tokens_compared": compared, "parted_at": places}
