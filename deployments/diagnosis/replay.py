"""Replay: makes logged answers again, and finds the first token or character that differs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import click
from pydantic import BaseModel, ValidationError

from deployments.diagnosis.http_client import Client, ServerError

PATHS = ("/v1/completions", "/v1/chat/completions")
Outcome = tuple[Literal["equal", "different", "refused"], str]


class Entry(BaseModel):
    """A logged request and its answer, as the API returned it; a line of a file."""

    path: str
    body: dict[str, Any]
    answer: dict[str, Any]


def read_entries(file: Path) -> list[Entry]:
    """Return the entries of JSON lines; raise a ClickException that names the first wrong line."""
    entries = []
    for number, line in enumerate(file.read_text().rstrip("\n").split("\n"), 1):  # JSON may hold U+2028
        try:
            entries.append(Entry.model_validate_json(line))
        except ValidationError as error:
            fault = error.errors()[0]
            raise click.ClickException(f"{file}, line {number}: {fault['loc']} {fault['msg']}") from error
    return entries


def replay_entry(entry: Entry, client: Client, *, any_server: bool) -> Outcome:
    """Make an answer again and compare every choice; with `any_server`, also if the fingerprint differs."""
    if entry.path not in PATHS:
        return "refused", f"path is {entry.path}; it must be {' or '.join(PATHS)}"
    if entry.body.get("seed") is None:
        return "refused", "the request has no seed, so each answer is another one"
    body = {name: value for name, value in entry.body.items() if name not in ("stream", "stream_options")}
    try:
        answer = client.post(entry.path, body | {"return_token_ids": True})
    except ServerError as error:
        return "refused", error.message
    logged, here = entry.answer.get("system_fingerprint"), answer["system_fingerprint"]
    if logged != here and not any_server:
        return "refused", f"system_fingerprint is {logged}, the server's {here}; --any-server compares all the same"
    before, after = entry.answer.get("choices", []), answer["choices"]
    if len(before) != len(after):
        return "different", f"{len(before)} choices were logged, now there are {len(after)}"
    for old, new in zip(before, after, strict=True):
        if (difference := _difference(old, new, client)) is not None:
            return "different", f"choice {new['index']}, {difference}"
    return "equal", f"{sum(len(new['token_ids']) for new in after)} tokens"


def first_difference(expected: Sequence[object], actual: Sequence[object]) -> int | None:
    """Return the first position where two sequences differ, or the shorter sequence ends; None if they are equal."""
    shared = min(len(expected), len(actual))
    differing = (position for position in range(shared) if expected[position] != actual[position])
    return next(differing, None if len(expected) == len(actual) else shared)


def _difference(old: dict[str, Any], new: dict[str, Any], client: Client) -> str | None:
    if (expected := old.get("token_ids")) is None:
        position = first_difference(_text(old), _text(new))
        return None if position is None else f"character {position}: {_text(old)[position:][:20]!r} was logged"
    if (position := first_difference(expected, new["token_ids"])) is None:
        return None
    both = [ids[position : position + 1] for ids in (expected, new["token_ids"])]
    texts = [
        f"{ids[0]} {client.post('/detokenize', {'tokens': ids})['prompt']!r}" if ids else "the end" for ids in both
    ]
    return f"token {position}: {texts[0]} was logged, now it is {texts[1]}"


def _text(choice: dict[str, Any]) -> str:
    """Return a choice's text, or its message's content and calls without their ids, which are random."""
    message = choice.get("message", {})
    calls = [call["function"]["name"] + call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return "".join([choice.get("text") or message.get("content") or "", *calls])
