"""Trial: tokens per second with drafts and without, and the speed-up that the rounds alone promise.

The promise (`engine/control/judge.py`) counts rounds only. So a reader of the text who gets less has lost time outside
the rounds.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from operator import sub
from pathlib import Path
from typing import NamedTuple

import click

from deployments.config import AppConfig
from deployments.diagnosis.finding import Finding, judged
from deployments.diagnosis.machine import size_text
from deployments.diagnosis.models import weight_file_bytes
from engine.config import BUNDLED_TARGET
from engine.control.judge import PROBLEMS, speed_up
from engine.models.registry import open_model
from engine.params import SamplingParams

TEMPERATURE = 0.7
NUM_TOKENS = 64
TOLERANCE = 0.15
"""How far the measured speed-up may be from the predicted one."""
TRIAL_S = 4.0
"""For passes; with imports and loading, a trial takes ten seconds."""
_MAX_WEIGHT_BYTES = 2 * 2**30
_MIN_TURNS = 2
_MAX_LENGTH = 1024


class Figures(NamedTuple):
    """Counts and times of decoding, which grow; `seconds` is the reader's clock, `round_s` the engine's."""

    num_tokens: float
    seconds: float
    num_rounds: float
    round_s: float
    num_accepted: float


def read_texts(file: Path | None = None) -> list[str]:
    """Return the prompts of a file, with blank lines between them; by default, the bundled ones."""
    blocks = (file or BUNDLED_TARGET.parent / "prompts.txt").read_text().split("\n\n")
    if not (texts := [block.strip("\n") for block in blocks if block.strip()]):
        raise click.ClickException(f"there is no text in {file}")
    return texts


def take_turns(decode: Callable[[str, int, bool], Figures]) -> tuple[Figures, Figures]:
    """Return the figures without drafts and with them; `decode` gets a text, a seed and whether to draft."""
    ways: list[list[Figures]] = [[], []]
    prompts, until = read_texts(), time.monotonic() + TRIAL_S
    decode(prompts[0], 0, True)  # what is first is slower: caches fill, and allocations grow
    while len(ways[1]) < _MIN_TURNS or time.monotonic() < until:
        turn = len(ways[1])
        for has_draft in (False, True) if turn % 2 else (True, False):
            ways[has_draft].append(decode(prompts[turn % len(prompts)], turn, has_draft))
    plain, drafted = (Figures(*map(sum, zip(*way, strict=True))) for way in ways)
    return plain, drafted


def speed_finding(subject: str, plain: Figures, drafted: Figures) -> Finding:
    """Compare the measured speed-up with the predicted one."""
    speeds = [one.num_tokens / one.seconds for one in (plain, drafted)]
    tokens, plain_s = drafted.num_rounds + drafted.num_accepted, drafted.num_rounds * plain.round_s / plain.num_rounds
    measured, predicted = speeds[1] / speeds[0], speed_up(tokens, drafted.num_accepted, drafted.round_s, plain_s)
    found = (
        f"{speeds[0]:.0f} tokens/s plain, {speeds[1]:.0f} with drafts: measured speed-up {measured:.2f}, "
        f"predicted {predicted:.2f}; {tokens / drafted.num_rounds:.2f} tokens a round"
    )
    advice = PROBLEMS["costs_more"] * (measured < 1 and drafted.num_accepted > 0)
    if abs(measured / predicted - 1) > TOLERANCE:
        advice = "they differ by more than 15 %: time is lost outside the rounds, or other work ran; measure again"
    return judged(subject, found, advice)


def trial_findings(config: AppConfig) -> Iterator[Finding]:
    """Try the pair in this process, with uncompiled passes and a draft that does not run ahead."""
    size, reason, settled = weight_file_bytes(config), "", config.settled
    if size > _MAX_WEIGHT_BYTES:
        reason = f"loading {size_text(size)} takes too long; start the server, and use --url"
    elif not settled.engine.num_speculative_tokens:
        reason = "the settings allow no drafts"
    elif settled.target.execution == "vllm":
        reason = "vLLM takes a process of its own; start the server, and use --url"
    if reason:
        yield Finding("ok", "trial", f"left out: {reason}")
        return
    from engine.llm import LLM

    length = min(_MAX_LENGTH, settled.engine.max_model_len or _MAX_LENGTH, open_model(settled.target).max_model_len)
    overrides = {"compile": "off", "speculation": "fixed", "max_num_seqs": 1, "max_model_len": length}
    llm = LLM(**asdict(config.pair) | overrides)

    def now() -> Figures:
        rounds, stats = llm.engine.request_stats.inter_token_s, llm.stats
        num_tokens, num_accepted = stats.num_generation_tokens, stats.num_accepted_tokens
        return Figures(num_tokens, time.perf_counter(), rounds.cumulative[-1], rounds.total, num_accepted)

    def decode(text: str, seed: int, has_draft: bool) -> Figures:
        limit = None if has_draft else 0
        params = SamplingParams(
            temperature=TEMPERATURE, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True, num_speculative_tokens=limit
        )
        before = now()
        llm.generate([text], params, show_progress=False)
        return Figures(*map(sub, now(), before))

    yield speed_finding("trial", *take_turns(decode))
