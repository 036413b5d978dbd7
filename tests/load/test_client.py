"""One request over a real socket: what arrives, and what can go wrong."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.load.client import Client, Clock, data_of_events
from tests.load.fake_server import NUM_ACCEPTED, NUM_DRAFTED, TOKENS_PER_CHUNK, FakeServer
from tests.load.records import Acceptance, Record
from tests.load.server import PATHS, Endpoint, extension_fields

PROMPT: dict[Endpoint, dict[str, Any]] = {
    "completions": {"prompt": "x" * 40},
    "chat": {"messages": [{"role": "user", "content": "x" * 40}]},
}


async def send(
    server: FakeServer, endpoint: Endpoint = "completions", timeout_s: float = 30.0, **fields: Any
) -> Record:
    client = Client(server.url, PATHS[endpoint], timeout_s=timeout_s)
    body = {**PROMPT[endpoint], "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}, **fields}
    try:
        return await client.send(body, Record(3, "d", scheduled_s=-5.0, sent_s=-5.0), Clock())
    finally:
        await client.close()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_stream_becomes_a_record(server: FakeServer, endpoint: Endpoint) -> None:
    record = await send(server, endpoint, **extension_fields("salt"))
    assert record.is_ok
    assert record.text.count("\u2028") == record.num_tokens == 7
    # One count for each piece that came, of one or several chunks.
    counts = [count for _, count in record.chunks]
    assert counts == sorted(set(counts) & {3, 6, 7})
    assert counts[-1] == 7
    assert record.num_prompt_tokens == (10 if endpoint == "completions" else 17)
    assert record.finish_reason == "length"
    steps = -(-7 // TOKENS_PER_CHUNK)
    assert record.acceptance == Acceptance(steps, steps * NUM_DRAFTED, steps * NUM_ACCEPTED)
    assert record.scheduled_s == -5.0 < record.sent_s < record.chunks[0][0] <= record.end_s


@pytest.mark.parametrize("failure", [429, 503, "cut", "error event", "no usage", "bad event", "stall"])
async def test_failures_are_named(server: FakeServer, failure: int | str) -> None:
    server.failures[1] = failure
    record = await send(server, timeout_s=0.2 if failure == "stall" else 30.0)
    assert record.outcome == ("timeout" if failure == "stall" else str(failure))
    assert record.message
    if isinstance(failure, int):
        assert record.retry_after_s == 0.01


STREAM = ': hello\n\ndata: {"a": "x\u2028y"}\r\n\r\nevent: ping\n\nid: 1\ndata: one\ndata:two\n\ndata: half'.encode()


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("size", [1, 3, len(STREAM)])
async def test_events_do_not_depend_on_where_the_bytes_are_cut_and_arrive_with_their_piece(size: int) -> None:
    parts = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    events = [event async for event in data_of_events(pieces(*parts), itertools.count().__next__)]
    assert [event[1:] for event in events] == [('{"a": "x\u2028y"}', ""), ("one\ntwo", "1")]
    ends = (STREAM.index(b"\r\n\r\n") + 4, STREAM.index(b"two\n\n") + 5)
    assert [event[0] for event in events] == [(end - 1) // size for end in ends]
