"""Arrivals: production traces of requests, at any rate.

Azure's traces (AzurePublicDataset, 2023, CC-BY-4.0) give the time, the prompt's length and the text's length of each
request: an hour of conversations, 5.5 per second, and of code completions, 2.6 per second in bursts.
"""

import csv
import random
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
CONVERSATIONS = TRACES / "azure_llm_2023_conv.csv"
_MICROSECONDS = 26
"""Characters of a time stamp, up to its microseconds."""


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


def read_trace(path: Path) -> list[Arrival]:
    """Return a trace's requests in order; times count from the first one."""
    with path.open(newline="") as file:
        rows = [
            (datetime.fromisoformat(row["TIMESTAMP"][:_MICROSECONDS]), row["ContextTokens"], row["GeneratedTokens"])
            for row in csv.DictReader(file)
        ]
    first = min(time for time, *_ in rows)
    arrivals = (Arrival((time - first).total_seconds(), int(prompt), max(1, int(text))) for time, prompt, text in rows)
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


def busiest(arrivals: list[Arrival], duration_s: float) -> list[Arrival]:
    """Return the requests of the window with the most of them; times count from its start."""
    best, best_first, first = 0, 0, 0
    for index, arrival in enumerate(arrivals):
        while arrival.time_s - arrivals[first].time_s > duration_s:
            first += 1
        if index + 1 - first > best:
            best, best_first = index + 1 - first, first
    window = arrivals[best_first : best_first + best]
    return [replace(arrival, time_s=arrival.time_s - window[0].time_s) for arrival in window]


def scale(arrivals: list[Arrival], factor: float, *, seed: int = 0) -> list[Arrival]:
    """Return the same load `factor` times: whole copies at shifted times, and a random part of one more copy."""
    chance = random.Random(seed)
    duration_s = arrivals[-1].time_s
    scaled: list[Arrival] = []
    for copy in range(int(factor)):
        shift_s = chance.uniform(0, duration_s) if copy else 0.0
        scaled += [replace(arrival, time_s=(arrival.time_s + shift_s) % duration_s) for arrival in arrivals]
    shift_s = chance.uniform(0, duration_s)
    scaled += [
        replace(arrival, time_s=(arrival.time_s + shift_s) % duration_s)
        for arrival in arrivals
        if chance.random() < factor % 1
    ]
    return sorted(scaled, key=lambda arrival: arrival.time_s)


def rate(arrivals: list[Arrival]) -> float:
    """Return requests per second."""
    return len(arrivals) / arrivals[-1].time_s
