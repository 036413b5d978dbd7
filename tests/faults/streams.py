"""Eight seeded requests that use every feature that a stream can have, and what a client receives of them."""

import asyncio
import json
import math
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.load.client import data_of_events

TIMEOUT_S = 120.0
NUM_RECONNECTS, RECONNECT_PAUSE_S = 60, 0.5
"""How often a client comes back that lost its connection, and after what pause."""
NUM_TOKENS = 400
_PROMPT = "This PEP proposes"
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_COMMON = {**_STREAM, "max_tokens": NUM_TOKENS, "return_token_ids": True}
_LONG = {**_COMMON, "ignore_eos": True}
_PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**_LONG, "prompt": _PROMPT, "temperature": 0}),
    ("/v1/completions", {**_LONG, "prompt": _PROMPT, "seed": 1, "temperature": 0.8, "logprobs": 2}),
    ("/v1/completions", {**_LONG, "prompt": _PROMPT, "seed": 2, "n": 2, "max_tokens": 300, "min_p": 0.05}),
    ("/v1/completions", {**_LONG, "prompt": ["def main(", "The 漢字 é"], "seed": 3, "top_p": 0.9, "max_tokens": 300}),
    ("/v1/completions", {**_COMMON, "prompt": "x", "seed": 4, "structured_outputs": {"regex": "([a-z]{3,9} ){60,70}"}}),
    ("/v1/completions", {**_LONG, **_PENALTIES, "prompt": _PROMPT, "seed": 5}),
    ("/v1/completions", {**_LONG, "prompt": _PROMPT, "seed": 6, "stop": ["e the ", "\n\n"], "min_tokens": 250}),
    (
        "/v1/chat/completions",
        {**_LONG, "messages": [{"role": "user", "content": "Hello"}], "seed": 7, "logprobs": True, "top_logprobs": 1},
    ),
]


@dataclass(slots=True)
class Choice:
    """One choice of an answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        message = choice.get("delta") or choice.get("message") or {}
        self.text += choice["text"] if "text" in choice else message.get("content") or ""
        self.token_ids += choice.get("token_ids") or []
        scores = choice.get("logprobs") or {}
        self.logprobs += scores.get("token_logprobs") or [entry["logprob"] for entry in scores.get("content") or ()]
        self.reason = choice["finish_reason"] or self.reason

    def difference(self, expected: "Choice") -> str | None:
        """Return how a client could tell this from what it expects; None if it could not."""
        if self.token_ids != expected.token_ids:
            pairs = enumerate(zip(self.token_ids, expected.token_ids, strict=False))
            shorter = min(len(self.token_ids), len(expected.token_ids))
            first = next((i for i, (token_id, other) in pairs if token_id != other), shorter)
            ids = self.token_ids[first : first + 8], expected.token_ids[first : first + 8]
            return f"token {first} of {len(expected.token_ids)}: {ids[0]} instead of {ids[1]}"
        if (self.text, self.reason) != (expected.text, expected.reason):
            return f"{self.text!r} ({self.reason}) instead of {expected.text!r} ({expected.reason})"
        if not _are_close(self.logprobs, expected.logprobs):
            return f"log probabilities {self.logprobs} instead of {expected.logprobs}"
        return None


@dataclass(slots=True)
class Received:
    """What a client received of one request, and how."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    code: str | None = None
    has_ended: bool = False
    num_reconnects: int = 0
    longest_gap_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def add(self, event: dict[str, Any]) -> None:
        """Take an event, or a whole body."""
        if "error" in event:
            self.error, self.code = event["error"]["message"], event["error"].get("code")
        if usage := event.get("usage"):  # its `cached_tokens` depend on earlier requests
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        for choice in event.get("choices", ()):
            self.choices.setdefault(choice["index"], Choice()).add(choice)

    def difference(self, expected: "Received") -> str | None:
        """Return how a client could tell this from what it expects, except by times; None if it could not."""
        for index in self.choices | expected.choices:
            choice = self.choices.get(index, Choice())
            if (difference := choice.difference(expected.choices.get(index, Choice()))) is not None:
                return f"choice {index}: {difference}"
        return None if self.usage == expected.usage else f"usage: {self.usage} instead of {expected.usage}"


def _are_close(actual: list[float | None], expected: list[float | None]) -> bool:
    """Whether log probabilities differ by their rounding only, which depends on the batch; a first token has none."""
    return len(actual) == len(expected) and all(
        value is other if value is None or other is None else math.isclose(value, other, abs_tol=1e-3)
        for value, other in zip(actual, expected, strict=True)
    )


async def receive(
    session: aiohttp.ClientSession,
    path: str,
    body: dict[str, Any],
    received: Received | None = None,
    *,
    num_reconnects: int = NUM_RECONNECTS,
) -> Received:
    """Send a request and read its stream or its body to the end, whatever that is.

    A stream may take several connections: a client that lost one, or is told to come back, continues on another.

    Args:
        received: is filled meanwhile.
    """
    received, event_id, last = received or Received(), "", time.monotonic()
    while True:
        try:
            headers = {"Last-Event-ID": event_id} if event_id else {}
            async with session.post(path, json=body, headers=headers) as response:
                if response.status != 200 or not body["stream"]:
                    received.add(await response.json())
                    received.has_ended = response.status == 200
                    if response.status != 503 or not num_reconnects:
                        return received
                else:
                    received.error = received.code = None
                    async for now, data, last_id in data_of_events(response.content.iter_any(), time.monotonic):
                        event_id = last_id
                        received.longest_gap_s, last = max(received.longest_gap_s, now - last), now
                        if data == "[DONE]":
                            received.has_ended = True
                            return received
                        received.add(json.loads(data))
                        if received.error is not None:
                            return received
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
            received.error = f"{type(error).__name__}: {error}"
        if received.num_reconnects == num_reconnects:
            return received
        received.num_reconnects += 1
        await asyncio.sleep(RECONNECT_PAUSE_S)


def open_session(url: str) -> aiohttp.ClientSession:
    """Return a client that opens a connection per request and does not try again."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def receive_all(session: aiohttp.ClientSession, streams: list[Received]) -> None:
    """Send all requests at once, and fill a stream for each."""
    asked = zip(REQUESTS, streams, strict=True)
    await asyncio.gather(*(receive(session, path, body, stream) for (path, body), stream in asked))
