"""Client: requests to one server, its streams and its metrics; the server's complaints as one line."""

import json
from collections.abc import Iterator
from typing import Any

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT = httpx.Timeout(600, connect=5)


class ServerError(click.ClickException):
    """The server cannot be reached, or refuses a request; `status` is its answer's, 0 without one."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """The connections to one server; threads may share it."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT)

    def get(self, path: str) -> str:
        """Return the body of a route, also of one that answers 503, as `/health` may."""
        return self._checked("GET", path, None, is_busy_allowed=True).text

    def post(self, path: str, body: object) -> dict[str, Any]:
        """Return the JSON of an answer."""
        answer: dict[str, Any] = self._checked("POST", path, body).json()
        return answer

    def stream(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream; raise ServerError if one of them is an error, or the last one is missing."""
        rest = b""
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    response.read()
                _check(response)
                for piece in response.iter_bytes():  # httpx's lines would also end at U+2028
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: {"):
                            yield _event(path, line)
                        elif line.startswith(b"data: [DONE]"):
                            return
        except httpx.TransportError as error:
            raise ServerError(f"{self.url}{path}: {error}") from error
        raise ServerError(f"{self.url}{path}: the stream ended early")

    def metrics(self) -> "Metrics":
        """Return what /metrics says now."""
        return Metrics(self.get("/metrics"))

    def _checked(self, method: str, path: str, body: object, *, is_busy_allowed: bool = False) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise ServerError(f"{self.url}{path}: {error}") from error
        if not (is_busy_allowed and response.status_code == httpx.codes.SERVICE_UNAVAILABLE):
            _check(response)
        return response


def _event(path: str, line: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise ServerError(f"{path}: {event['error']['message']}")
    return event


def _check(response: httpx.Response) -> None:
    if response.is_error:
        text = response.text[:300]
        raise ServerError(f"{response.url}: status {response.status_code}: {text}", response.status_code)


class Metrics:
    """The samples of /metrics, summed over replicas."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str) -> float:
        """Return the sum of a metric; 0 if there is none."""
        return sum(sample.value for sample in self._samples if sample.name == name)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the sums of a metric by the values of some of its labels."""
        sums: dict[tuple[str, ...], float] = {}
        for sample in self._samples:
            if sample.name == name:
                key = tuple(sample.labels[label] for label in labels)
                sums[key] = sums.get(key, 0) + sample.value
        return sums
