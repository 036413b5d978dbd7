"""Replay: makes logged answers again, and finds the first token or character that differs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from deployments.diagnosis.client import Client, ServerError

PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class Entry:
    """A logged request and its answer, as the API returned it; one line of a file."""

    path: str
    body: dict[str, Any]
    answer: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of an entry: `equal`, `different` or `refused`, and the details."""

    outcome: str
    details: str


def read_entries(file: Path) -> list[Entry]:
    """Return the entries of JSON lines; raise a ClickException that names the line that is none."""
    entries = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            fields = json.loads(line)
            entries.append(Entry(fields["path"], dict(fields["body"]), dict(fields["answer"])))
        except (ValueError, KeyError, TypeError) as error:
            message = f"{file}, line {number} is not an object with path, body and answer: {error!r}"
            raise click.ClickException(message) from error
    return entries


def replay(entry: Entry, client: Client, *, any_server: bool) -> Replayed:
    """Make an answer again and compare every choice; with `any_server`, also if the server's fingerprint differs."""
    if entry.path not in PATHS:
        return Replayed("refused", f"path is {entry.path}; it must be {' or '.join(PATHS)}")
    if entry.body.get("seed") is None:
        return Replayed("refused", "the request has no seed, so its answer is another one each time")
    body = {name: value for name, value in entry.body.items() if name not in ("stream", "stream_options")}
    try:
        answer = client.post(entry.path, body | {"return_token_ids": True})
    except ServerError as error:
        return Replayed("refused", str(error))
    logged, here = entry.answer.get("system_fingerprint"), answer["system_fingerprint"]
    if logged != here and not any_server:
        return Replayed(
            "refused", f"system_fingerprint is {logged}, the server's {here}; --any-server compares all the same"
        )
    pairs = list(zip(entry.answer.get("choices", ()), answer["choices"], strict=False))
    if len(pairs) != len(answer["choices"]):
        return Replayed("different", f"the answer has {len(pairs)} choices, now there are {len(answer['choices'])}")
    for before, now in pairs:
        if difference := _difference(before, now, client):
            return Replayed("different", f"choice {now['index']}, {difference}")
    return Replayed("equal", f"{sum(len(now['token_ids']) for _, now in pairs)} tokens")


def first_difference(expected: Sequence[object], actual: Sequence[object]) -> int | None:
    """Return the first position where two sequences differ, or where the shorter one ends; None if they are equal."""
    shared = min(len(expected), len(actual))
    differing = (position for position in range(shared) if expected[position] != actual[position])
    return next(differing, None if len(expected) == len(actual) else shared)


def _difference(before: dict[str, Any], now: dict[str, Any], client: Client) -> str | None:
    """Return the first difference of two choices: a token if the logged one has token ids, else a character."""
    expected, actual, unit = before.get("token_ids"), now["token_ids"], "token"
    if expected is None:
        expected, actual, unit = _text(before), _text(now), "character"
    position = first_difference(expected, actual)
    if position is None:
        return None

    def shown(sequence: Sequence[Any]) -> str:
        if position >= len(sequence):
            return "the end"
        if unit == "character":
            return repr(sequence[position : position + 20])
        return f"{client.post('/detokenize', {'tokens': [sequence[position]]})['prompt']!r} ({sequence[position]})"

    return f"{unit} {position}: {shown(expected)} was logged, now it is {shown(actual)}"


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a choice; of a message, its content and the calls of tools without their random ids."""
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message", {})
    calls = [call["function"]["name"] + call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return "".join([message.get("content") or "", *calls])
