"""stream: a server's answer event by event, continued where a connection was lost."""

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import typer

from deployments.cli.terminal import CommandError

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before each try to continue a stream; after an event there are as many tries again."""
_TIMEOUT = httpx.Timeout(10.0, read=600.0)  # a request may wait in a queue
_PASSING = {429, 502, 503, 504}
"""Statuses that a later try may not have."""


def stream(url: str, path: str, body: dict[str, Any], api_key: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer; after a lost connection, the same request gets the rest of them.

    Raises CommandError if the server cannot be reached, refuses the request, or ends it with an error.
    """
    last_id, pauses = "", iter(PAUSES_S)
    with _client(url, api_key) as client:
        while True:
            try:
                headers = {"Last-Event-ID": last_id} if last_id else {}
                with client.stream("POST", path, json=body, headers=headers) as response:
                    _check(response)
                    for event_id, data in events(response.iter_bytes()):
                        last_id, pauses = event_id, iter(PAUSES_S)
                        if data == "[DONE]":
                            return
                        event = json.loads(data)
                        if "error" in event:
                            raise CommandError(event["error"]["message"])
                        yield event
                problem = f"{url} has cut the answer off"
            except httpx.TransportError as error:
                problem = f"{url}: {error or type(error).__name__}"
            pause_s = next(pauses, None)
            if not last_id or pause_s is None:
                raise CommandError(problem)
            typer.echo(f"{problem}; continuing in {pause_s:g} s", err=True)
            time.sleep(pause_s)


def served_model(url: str, api_key: str | None = None) -> str:
    """Return the name of the first model that a server has; raise CommandError if it cannot be asked."""
    with _client(url, api_key) as client:
        try:
            _check(response := client.get("/v1/models"))
        except httpx.TransportError as error:
            raise CommandError(f"cannot reach {url} ({error}); `paceline serve` starts a server") from error
        name: str = response.json()["data"][0]["id"]
        return name


def events(pieces: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the id and the data of each server-sent event; an event without an id has that of the one before it.

    Lines end at LF or CR LF only: JSON strings may hold the other characters at which httpx splits lines.
    """
    rest, event_id, data = b"", "", ""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            name, _, value = line.removesuffix(b"\r").decode().partition(":")
            if name == "data":
                data += value.removeprefix(" ")
            elif name == "id":
                event_id = value.removeprefix(" ")
            elif not name and not value and data:
                yield event_id, data
                data = ""


def _client(url: str, api_key: str | None) -> httpx.Client:
    keys = (api_key or "").split()  # the server's own variable may hold several
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    return httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT)


def _check(response: httpx.Response) -> None:
    """Raise what a server says if it refuses a request: a TransportError if it may accept a later one."""
    if response.is_success:
        return
    text = response.read().decode(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = text[:200]
    error = httpx.ReadError if response.status_code in _PASSING else CommandError
    raise error(f"the answer is {response.status_code}: {message}")
