"""Client: requests to one server, its streams and its metrics."""

import json
from collections.abc import Iterator
from typing import Any

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families


class ServerError(click.ClickException):
    """The server cannot be reached, or refuses a request, with `status`."""

    status = 0


class Client:
    """The connections to one server; threads may share it. Its methods raise ServerError."""

    def __init__(self, url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        keys = (api_key or "").split()  # the server's own variable may hold several
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        self.url = url.rstrip("/")
        timeout = httpx.Timeout(600, connect=5)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, transport=transport)

    def get(self, path: str) -> Any:
        """Return the JSON of a route, whatever its status: `/health` answers with 503, too."""
        return self._send("GET", path).json()

    def post(self, path: str, body: object) -> Any:
        """Return the JSON of an answer."""
        response = self._send("POST", path, body)
        if response.is_error:
            error = ServerError(f"{response.url}: status {response.status_code}: {response.text[:300]}")
            error.status = response.status_code
            raise error
        return response.json()

    def stream(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream."""
        rest = b""
        try:
            with self._http.stream("POST", path, json=body) as response:
                for piece in response.iter_bytes():  # httpx's lines would also end at U+2028
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: {"):
                            event = json.loads(line.removeprefix(b"data: "))
                            if "error" in event:
                                raise ServerError(f"{self.url}{path}: {event['error']['message']}")
                            yield event
                        elif line.startswith(b"data: [DONE]"):
                            return
        except httpx.TransportError as error:
            raise ServerError(f"{self.url}{path}: {error}") from error
        raise ServerError(f"{self.url}{path}: the stream ended early, with {rest[:300]!r}")

    def metrics(self) -> "Metrics":
        """Return what /metrics says now."""
        families = text_string_to_metric_families(self._send("GET", "/metrics").text)
        return Metrics(sample for family in families for sample in family.samples)

    def _send(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise ServerError(f"{self.url}{path}: {error}") from error


class Metrics(tuple[Any, ...]):
    """The samples of /metrics."""

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the sums of a metric by the values of some of its labels."""
        samples = [sample for sample in self if sample.name == name]
        keys = [tuple(sample.labels[label] for label in labels) for sample in samples]
        return {key: sum(s.value for k, s in zip(keys, samples, strict=True) if k == key) for key in keys}

    def total(self, name: str) -> float:
        """Return the sum of a metric; 0 if there is none."""
        return self.by(name).get((), 0.0)
