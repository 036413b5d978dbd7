"""Traces of production traffic: Azure's CSV files and Mooncake's JSON lines, and the part of one that is replayed.

Azure's traces (AzurePublicDataset, 2023, CC-BY-4.0) have an hour of conversations, 5.5 per second, and of code
completions, 2.6 per second in bursts. As for AIPerf, a line of Mooncake's format may have its prompt as `text_input`
instead of an `input_length`.
"""

import csv
import json
import random
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from .server import LoadError

BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's `hash_ids`; requests whose ids begin alike have prompts that begin alike."""
_MICROSECONDS = 26
"""Characters of a time stamp of Azure's, up to its microseconds."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, and when it comes."""

    time_s: float
    num_prompt_tokens: int
    num_tokens: int
    """Tokens that are generated for it."""
    block_ids: tuple[int, ...] = ()
    """Contents of the prompt's blocks, where the trace tells them: prompts with equal ids begin alike."""
    prompt: str | None = None
    """The prompt itself, where the trace tells it; its tokens are then not counted."""


def read(path: Path) -> list[Arrival]:
    """Return a trace's requests in order; times count from the first one.

    Raises LoadError if the file cannot be read, or is no trace.
    """
    try:
        arrivals = _read_mooncake(path) if path.suffix == ".jsonl" else _read_azure(path)
    except (OSError, KeyError, ValueError) as error:
        raise LoadError(f"{path} is no trace of Azure's (.csv) or Mooncake's (.jsonl) format: {error!r}") from error
    if not arrivals or not arrivals[-1].time_s:
        raise LoadError(f"{path} holds {len(arrivals)} requests at one time; a trace needs at least two times")
    return arrivals


def excerpt(arrivals: list[Arrival], *, duration_s: float | None, requests_per_s: float | None) -> list[Arrival]:
    """Return the busiest window of a duration, thinned or multiplied to a mean rate; None leaves it as it is.

    Raises LoadError if the window holds too few requests to have a rate.
    """
    if duration_s is not None:
        arrivals = _busiest(arrivals, duration_s)
        if not arrivals[-1].time_s:
            raise LoadError(f"no {duration_s:g} s of the trace hold requests at two times; give a longer --duration")
    if requests_per_s is not None:
        arrivals = _scaled(arrivals, requests_per_s * arrivals[-1].time_s / len(arrivals))
    return arrivals


def fit(arrivals: list[Arrival], *, max_prompt_tokens: int, max_tokens: int) -> tuple[list[Arrival], int]:
    """Return the requests with lengths cut to what the model takes, and how many of them were cut."""
    fitted = [
        replace(
            arrival,
            num_prompt_tokens=min(arrival.num_prompt_tokens, max_prompt_tokens),
            num_tokens=min(arrival.num_tokens, max_tokens),
        )
        for arrival in arrivals
    ]
    return fitted, sum(after != before for after, before in zip(fitted, arrivals, strict=True))


def _busiest(arrivals: list[Arrival], duration_s: float) -> list[Arrival]:
    """Return the requests of the window with the most of them; times count from its start."""
    best, best_first, first = 0, 0, 0
    for index, arrival in enumerate(arrivals):
        while arrival.time_s - arrivals[first].time_s > duration_s:
            first += 1
        if index + 1 - first > best:
            best, best_first = index + 1 - first, first
    window = arrivals[best_first : best_first + best]
    return [replace(arrival, time_s=arrival.time_s - window[0].time_s) for arrival in window]


def _scaled(arrivals: list[Arrival], factor: float) -> list[Arrival]:
    """Return the same load `factor` times: whole copies at shifted times, and a random part of one more copy."""
    chance, duration_s = random.Random(0), arrivals[-1].time_s
    scaled: list[Arrival] = []
    for copy in range(int(factor) + 1):
        shift_s = chance.uniform(0, duration_s) if copy else 0.0
        scaled += [
            replace(arrival, time_s=(arrival.time_s + shift_s) % duration_s)
            for arrival in arrivals
            if copy < int(factor) or chance.random() < factor % 1
        ]
    return sorted(scaled, key=lambda arrival: arrival.time_s)


def _read_azure(path: Path) -> list[Arrival]:
    with path.open(newline="") as file:
        rows = [
            (datetime.fromisoformat(row["TIMESTAMP"][:_MICROSECONDS]), row["ContextTokens"], row["GeneratedTokens"])
            for row in csv.DictReader(file)
        ]
    first = min(time for time, *_ in rows)
    arrivals = (Arrival((time - first).total_seconds(), int(prompt), max(1, int(text))) for time, prompt, text in rows)
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


def _read_mooncake(path: Path) -> list[Arrival]:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    first = min((row["timestamp"] for row in rows), default=0)
    arrivals = (
        Arrival(
            (row["timestamp"] - first) / 1000,
            0 if "text_input" in row else row["input_length"],
            max(1, row["output_length"]),
            tuple(row.get("hash_ids") or ()),
            row.get("text_input"),
        )
        for row in rows
    )
    return sorted(arrivals, key=lambda arrival: arrival.time_s)
