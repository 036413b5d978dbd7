"""Client: requests to one server, its streams and its metrics."""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click
import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # before tries to continue a lost stream; each event allows all tries again
_PASSING = {0, 429, 502, 503, 504}  # statuses after which a later try may succeed; 0 is a lost connection
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    range(0x7F, 0xA0), "\ufffd"
)
"""Replacements of control characters, because a text must not command a terminal."""


class ServerError(click.ClickException):
    """The server cannot be reached (`status` is 0), refuses a request, or fails while it answers."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message.translate(VISIBLE))
        self.status = status


class Client:
    """The connections to a server; shared by threads; methods raise ServerError. Of several keys, the first is sent."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        pauses_s: Sequence[float] = (),
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        keys = (api_key or "").split()
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        self.url, self._pauses_s = url.rstrip("/"), pauses_s
        timeout = httpx.Timeout(10, read=600)  # a request may wait in a queue
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, transport=transport)

    def get(self, path: str, *accepted: int) -> Any:
        """Return the JSON of a route, also of an error whose status is `accepted`."""
        return self._send("GET", path, accepted=accepted).json()

    def post(self, path: str, body: object) -> Any:
        return self._send("POST", path, body).json()

    def stream(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream; after a lost connection, the same request gets the remaining events."""
        last_id, pauses = "", iter(self._pauses_s)
        while True:
            headers = {"Last-Event-ID": last_id} if last_id else {}
            try:
                with self._http.stream("POST", path, json=body, headers=headers) as response:
                    _check(response)
                    for event_id, data in events(response.iter_bytes()):
                        last_id, pauses = event_id, iter(self._pauses_s)
                        if data == "[DONE]":
                            return
                        event = json.loads(data)
                        if "error" in event:
                            raise ServerError(f"{self.url}{path}: {event['error']['message']}", response.status_code)
                        yield event
                problem = ServerError(f"{self.url}{path}: the stream ended early")
            except httpx.TransportError as error:
                problem = self._lost(path, error)
            except ServerError as error:
                problem = error
            pause_s = next(pauses, None)
            if problem.status not in _PASSING or not last_id or pause_s is None:
                raise problem
            typer.echo(f"{problem}; continuing in {pause_s:g} s", err=True)
            time.sleep(pause_s)

    def metrics(self) -> "Metrics":
        families = text_string_to_metric_families(self._send("GET", "/metrics").text)
        return Metrics(sample for family in families for sample in family.samples)

    def _send(self, method: str, path: str, body: object = None, accepted: Sequence[int] = ()) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise self._lost(path, error) from error
        if response.status_code not in accepted:
            _check(response)
        return response

    def _lost(self, path: str, error: httpx.TransportError) -> ServerError:
        message = f"{self.url}{path}: {error or type(error).__name__}"
        is_down = isinstance(error, httpx.ConnectError)
        return ServerError(f"cannot reach {message}; `paceline serve` starts a server" if is_down else message)


class Metrics(tuple[Any, ...]):
    """The samples of /metrics."""

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the sums of a metric by the values of some of its labels."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for sample in self:
            if sample.name == name:
                sums[tuple(sample.labels[label] for label in labels)] += sample.value
        return dict(sums)

    def total(self, name: str) -> float:
        return self.by(name).get((), 0.0)


def events(pieces: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the id and data of each server-sent event; only LF ends a line, because JSON may hold other line ends."""
    unfinished, event_id, data = b"", "", ""
    for piece in pieces:
        *lines, unfinished = (unfinished + piece).split(b"\n")
        for line in lines:
            name, _, value = line.removesuffix(b"\r").decode().partition(":")
            if name == "data":
                data += value.removeprefix(" ")
            elif name == "id":
                event_id = value.removeprefix(" ")
            elif not name and not value and data:
                yield event_id, data
                data = ""


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    text = response.read().decode(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = text[:300]
    raise ServerError(f"{response.url}: the answer is {response.status_code}: {message}", response.status_code)
