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
    server: FakeServer,
    *,
    endpoint: Endpoint = "completions",
    url: str | None = None,
    timeout_s: float = 30.0,
    **fields: Any,
) -> Record:
    client = Client(url or server.url, PATHS[endpoint], api_key="key", timeout_s=timeout_s)
    body = {**PROMPT[endpoint], "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}, **fields}
    try:
        return await client.send(body, Record(3, "d", scheduled_s=-5.0, sent_s=-5.0), Clock())
    finally:
        await client.close()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_stream_becomes_a_record(server: FakeServer, endpoint: Endpoint) -> None:
    record = await send(server, endpoint=endpoint, **extension_fields("salt"))
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
    assert record.histogram == [0, 0, steps, 0, 0]
    assert record.scheduled_s == -5.0 < record.sent_s < record.chunks[0][0] <= record.end_s
    assert server.keys == {"Bearer key"}


async def test_without_extensions_tokens_are_counted_at_the_end_only(server: FakeServer) -> None:
    server.has_extensions = False
    record = await send(server)
    assert record.is_ok
    assert record.num_tokens == 7
    assert {count for _, count in record.chunks} == {0}
    assert record.itl_s == []
    assert record.tpot_s is not None
    assert record.acceptance is None


@pytest.mark.parametrize("failure", [429, 503, "cut", "error event", "no usage", "bad event"])
async def test_failures_are_named(server: FakeServer, failure: int | str) -> None:
    server.failures[1] = failure
    record = await send(server)
    assert record.outcome == str(failure)
    assert record.message
    if isinstance(failure, int):
        assert record.retry_after_s == 0.01


async def test_a_stream_that_stalls_is_given_up(server: FakeServer) -> None:
    server.failures[1] = "stall"
    record = await send(server, timeout_s=0.2)
    assert record.outcome == "timeout"


async def test_a_chats_prompt_ids_are_kept(server: FakeServer) -> None:
    assert (await send(server, endpoint="chat", return_token_ids=True)).prompt_token_ids == [5, 6]


STREAM = ': hello\n\ndata: {"a": "x\u2028y"}\r\n\r\nevent: ping\n\ndata: one\ndata:two\n\ndata: [DONE]\n\n'.encode()
DATA = ['{"a": "x\u2028y"}', "one\ntwo", "[DONE]"]


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
async def test_events_do_not_depend_on_where_the_bytes_are_cut(size: int) -> None:
    parts = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [data async for _, data, _ in data_of_events(pieces(*parts), itertools.count().__next__)] == DATA


async def test_an_event_without_its_empty_line_is_not_one() -> None:
    stream = pieces(b"data: whole\n\ndata: half\n")
    assert [data async for _, data, _ in data_of_events(stream, itertools.count().__next__)] == ["whole"]


async def test_events_of_one_piece_arrive_at_one_time() -> None:
    stream = pieces(b"data: 1\n\nid: a\ndata: 2\n\nda", b"ta: 3\n\n")
    found = [event async for event in data_of_events(stream, itertools.count(5).__next__)]
    assert found == [(5, "1", ""), (5, "2", "a"), (6, "3", "a")]


async def test_an_event_is_given_before_the_next_bytes_are_asked_for() -> None:
    asked: list[bytes] = []

    async def watched() -> AsyncIterator[bytes]:
        for part in (b"data: 1\n\n", b"data: 2\n\n"):
            asked.append(part)
            yield part

    events = data_of_events(watched(), itertools.count().__next__)
    assert await anext(events) == (0, "1", "")
    assert len(asked) == 1
