"""Client: sends one request as a stream, and notes when its tokens arrive."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from .records import Acceptance, Record

DEFAULT_RETRY_AFTER_S = 1.0
MAX_MESSAGE_CHARS = 300


class Clock:
    """Seconds since it was made.

    Attributes:
        unix_s: when that was, to find the run in logs and dashboards.
    """

    def __init__(self) -> None:
        self.unix_s = time.time()
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s


class Client:
    """The connections to one server; as many as there are open requests, and kept between requests.

    Args:
        url: the server's address, without `/v1`.
        path: of the API that requests go to, as `/v1/completions`.
        timeout_s: how long a request may take from the time it is sent.
    """

    def __init__(self, url: str, path: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._path = path
        self._timeout_s = timeout_s
        self.http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=None,
        )

    async def send(self, body: dict[str, Any], record: Record, clock: Clock) -> Record:
        """Send a request and fill its record with what comes back, whatever that is."""
        record.sent_s = clock.now_s()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, record, clock)
        except TimeoutError:
            record.outcome, record.message = "timeout", f"not finished after {self._timeout_s:g} s"
        except httpx.TransportError as error:
            record.outcome, record.message = type(error).__name__, str(error)
        except (ValueError, KeyError, TypeError) as error:  # no JSON, or not the fields of the API
            record.outcome, record.message = "bad event", repr(error)
        record.end_s = clock.now_s()
        return record

    async def close(self) -> None:
        await self.http.aclose()

    async def _stream(self, body: dict[str, Any], record: Record, clock: Clock) -> None:
        async with self.http.stream("POST", self._path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                record.outcome = str(response.status_code)
                record.message = (await response.aread()).decode(errors="replace")[:MAX_MESSAGE_CHARS]
                record.retry_after_s = _retry_after_s(response)
                return
            async for arrived_s, data, _ in data_of_events(response.aiter_bytes(), clock.now_s):
                if data == "[DONE]":
                    break
                event = json.loads(data)
                if "error" in event:
                    record.outcome, record.message = "error event", json.dumps(event["error"])[:MAX_MESSAGE_CHARS]
                    return
                _take(event, arrived_s, record)
            else:
                record.outcome, record.message = "cut", "the stream ended without [DONE]"
                return
        if not record.num_tokens:
            record.outcome, record.message = "no usage", "the server did not report how many tokens it generated"


async def data_of_events(
    stream: AsyncIterator[bytes], now_s: Callable[[], float]
) -> AsyncIterator[tuple[float, str, str]]:
    """Yield the arrival time, the data and the id of each event, as soon as it is complete.

    Times are equal if events came at once; an event without an id has that of the one before.

    Lines end at LF or CR LF only. httpx's own line iterator also splits at U+2028 and others, which JSON strings may
    contain. Comments, which servers send to keep a connection open, and other fields are skipped.
    """
    rest = event_id = b""
    data: list[bytes] = []
    async for piece in stream:
        arrived_s = now_s()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            content = line.removesuffix(b"\r")
            if content.startswith(b"data:"):
                data.append(content.removeprefix(b"data:").removeprefix(b" "))
            elif content.startswith(b"id: "):
                event_id = content.removeprefix(b"id: ")
            elif not content and data:
                yield arrived_s, b"\n".join(data).decode(), event_id.decode()
                data = []


def _take(event: dict[str, Any], arrived_s: float, record: Record) -> None:
    text = ""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        thoughts = delta.get("reasoning_content")
        record.has_thoughts |= bool(thoughts)
        text += choice.get("text") or thoughts or delta.get("content") or ""
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    record.text += text
    if kept := event.get("record"):
        record.kept = kept
        if not record.has_thoughts:  # which were parted from the text
            kept["choices"][0]["text"] = record.text
    num_before = record.num_tokens
    usage = event.get("usage")
    if usage is not None:
        record.num_prompt_tokens = usage["prompt_tokens"]
        record.num_tokens = usage["completion_tokens"]
    is_counted = bool(event.get("choices")) and usage is not None
    if (is_counted and record.num_tokens > num_before) or (text and usage is None):
        if record.chunks and record.chunks[-1][0] == arrived_s:
            record.chunks.pop()  # both came in one piece, so no time passed between their tokens
        record.chunks.append((arrived_s, record.num_tokens if is_counted else 0))
    figures = (event.get("metrics") or {}).get("speculative_decoding")
    if figures is not None:
        record.acceptance = Acceptance(
            figures["num_spec_steps"], figures["num_draft_tokens"], figures["num_accepted_draft_tokens"]
        )


def _retry_after_s(response: httpx.Response) -> float:
    """Return how long the server asks to wait."""
    try:
        return float(response.headers["retry-after"])
    except (KeyError, ValueError):  # none, or a date
        return DEFAULT_RETRY_AFTER_S
