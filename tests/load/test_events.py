"""Events are found wherever the network cuts the bytes."""

import itertools
from collections.abc import AsyncIterator

import pytest

from tests.load.events import data_of_events

STREAM = ': hello\n\ndata: {"a": "x\u2028y"}\r\n\r\nevent: ping\n\ndata: one\ndata:two\n\ndata: [DONE]\n\n'.encode()
DATA = ['{"a": "x\u2028y"}', "one\ntwo", "[DONE]"]


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
async def test_events_do_not_depend_on_where_the_bytes_are_cut(size: int) -> None:
    parts = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [data async for _, data in data_of_events(pieces(*parts), itertools.count().__next__)] == DATA


async def test_an_event_without_its_empty_line_is_not_one() -> None:
    stream = pieces(b"data: whole\n\ndata: half\n")
    assert [data async for _, data in data_of_events(stream, itertools.count().__next__)] == ["whole"]


async def test_events_of_one_piece_arrive_at_one_time() -> None:
    stream = pieces(b"data: 1\n\ndata: 2\n\nda", b"ta: 3\n\n")
    found = [event async for event in data_of_events(stream, itertools.count(5).__next__)]
    assert found == [(5, "1"), (5, "2"), (6, "3")]


async def test_an_event_is_given_before_the_next_bytes_are_asked_for() -> None:
    asked: list[bytes] = []

    async def watched() -> AsyncIterator[bytes]:
        for part in (b"data: 1\n\n", b"data: 2\n\n"):
            asked.append(part)
            yield part

    events = data_of_events(watched(), itertools.count().__next__)
    assert await anext(events) == (0, "1")
    assert len(asked) == 1
