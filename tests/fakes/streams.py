"""Readers of server-sent events."""

import json
from collections.abc import Iterable
from typing import Any


def data_of(lines: Iterable[str]) -> list[str]:
    """The data of a stream's events, one a line; the stream must end in [DONE], which is left out."""
    *events, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert done == "[DONE]", done
    return events


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON of the events of a whole stream, which must end in [DONE]."""
    return [json.loads(data) for data in data_of(text.split("\n"))]
