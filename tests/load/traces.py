"""Traces of production traffic: Azure's CSV files and Mooncake's JSON lines, and the part of one that is replayed.

As for AIPerf, a line of Mooncake's format may have its prompt as `text_input` instead of an `input_length`.
"""

import json
from dataclasses import replace
from pathlib import Path

from tests.bench.arrivals import Arrival, busiest, rate, read_trace, scale
from tests.load.server import LoadError

BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's `hash_ids`; requests whose ids begin alike have prompts that begin alike."""


def read(path: Path) -> list[Arrival]:
    """Return a trace's requests in order; times count from the first one.

    Raises:
        LoadError: the file cannot be read, or is no trace.
    """
    try:
        arrivals = _read_mooncake(path) if path.suffix == ".jsonl" else read_trace(path)
    except (OSError, KeyError, ValueError) as error:
        raise LoadError(f"{path} is no trace of Azure's (.csv) or Mooncake's (.jsonl) format: {error!r}") from error
    if not arrivals or not arrivals[-1].time_s:
        raise LoadError(f"{path} holds {len(arrivals)} requests at one time; a trace needs at least two times")
    return arrivals


def excerpt(arrivals: list[Arrival], *, duration_s: float | None, requests_per_s: float | None) -> list[Arrival]:
    """Return the busiest window of a duration, thinned or multiplied to a mean rate; None leaves it as it is.

    Raises:
        LoadError: the window holds too few requests to have a rate.
    """
    if duration_s is not None:
        arrivals = busiest(arrivals, duration_s)
        if not arrivals[-1].time_s:
            raise LoadError(f"no {duration_s:g} s of the trace hold requests at two times; give a longer --duration")
    if requests_per_s is not None:
        arrivals = scale(arrivals, requests_per_s / rate(arrivals))
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
