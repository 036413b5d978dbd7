import asyncio
from dataclasses import replace

import pytest

from deployments.router.stream import Stream
from engine.errors import TargetError
from engine.sequence import FinishReason, RequestOutput
from tests.deployments.fakes import Rig, generation


def output(token: int, *, finish_reason: FinishReason | None = None, request_id: str = "a-0") -> RequestOutput:
    return RequestOutput(request_id, [token], "x", finish_reason, None, None, 3, 0, 0, 0)


async def is_waiting(stream: Stream) -> bool:
    """Whether `next` would wait; nothing is lost by asking."""
    for _ in range(3):
        await asyncio.sleep(0)
    return not stream._is_ready.is_set()


async def tokens(stream: Stream) -> list[int]:
    return [token for output in await stream.next() for token in output.token_ids]


async def test_without_an_interval_every_round_goes_at_once() -> None:
    stream = Stream(0.0)
    for token in range(3):
        stream.put([output(token)])
        assert await tokens(stream) == [token]


async def test_rounds_that_nobody_took_go_together() -> None:
    stream = Stream(0.0)
    for token in range(3):
        stream.put([output(token)])
    assert await tokens(stream) == [0, 1, 2]
    assert await is_waiting(stream)


def let_pass(stream: Stream) -> None:
    """Move the clock past the interval, before anything else is due."""
    stream._due = 0.0


async def test_the_first_round_goes_at_once_and_those_within_the_interval_with_the_first_after_it() -> None:
    stream = Stream(3600.0)
    stream.put([output(0)])
    assert await tokens(stream) == [0]
    stream.put([output(1)])
    stream.put([output(2)])
    let_pass(stream)
    assert await is_waiting(stream)
    stream.put([output(3)])
    assert await tokens(stream) == [1, 2, 3]
    stream.put([output(4)])
    assert await is_waiting(stream)


async def test_what_no_round_follows_goes_by_itself() -> None:
    stream = Stream(0.02)
    stream.put([output(0)])
    await stream.next()
    stream.put([output(1)])
    async with asyncio.timeout(5):
        assert await tokens(stream) == [1]


@pytest.mark.parametrize("gathers_first", [False, True])
async def test_the_last_round_of_a_sequence_goes_at_once(gathers_first: bool) -> None:
    stream = Stream(3600.0, gathers_first=gathers_first)
    stream.put([output(0), output(7, request_id="a-1")])
    if not gathers_first:
        await stream.next()
    stream.put([output(1)])
    assert await is_waiting(stream)
    stream.put([output(2, finish_reason="stop"), output(8, request_id="a-1")])
    assert (await tokens(stream))[-3:] == [1, 2, 8]
    stream.put([output(9, request_id="a-1")])
    assert await is_waiting(stream)
    stream.put([output(10, finish_reason="length", request_id="a-1")])
    assert await tokens(stream) == [9, 10]


async def test_the_first_tokens_can_be_gathered_too() -> None:
    stream = Stream(3600.0, gathers_first=True)
    stream.put([output(0)])
    stream.put([output(1)])
    assert await is_waiting(stream)
    stream.put([output(2, finish_reason="length")])
    assert await tokens(stream) == [0, 1, 2]


async def test_an_error_comes_after_what_was_there_before_it() -> None:
    stream = Stream(3600.0)
    stream.put([output(0)])
    await stream.next()
    stream.put([output(1)])
    stream.fail(TargetError("lost"))
    assert await tokens(stream) == [1]
    with pytest.raises(TargetError, match="lost"):
        await stream.next()


async def test_what_was_taken_early_is_not_delivered_again() -> None:
    stream = Stream(3600.0)
    stream.put([output(0)])
    await stream.next()
    stream.put([output(1)])
    assert stream._timer is not None
    stream.put([output(2, finish_reason="stop", request_id="a-1")])
    assert await tokens(stream) == [1, 2]
    assert stream._timer is None


async def test_a_closed_stream_wakes_nobody() -> None:
    stream = Stream(3600.0)
    stream.put([output(0)])
    await stream.next()
    stream.put([output(1)])
    timer = stream._timer
    stream.close()
    assert timer is not None
    assert timer.cancelled()


async def test_a_deadline_withholds_nothing(rig: Rig) -> None:
    request = replace(generation(max_tokens=400), interval_s=3600.0, timeout_s=0.5)
    stream = rig.loop.generate(request)
    first = await anext(stream)
    rounds = rig.verifier.num_rounds
    while rig.verifier.num_rounds < rounds + 3:
        await asyncio.sleep(0)
    rig.verifier.gate.clear()
    withheld = await anext(stream)
    assert len(withheld) >= 2
    with pytest.raises(TimeoutError, match=r"0\.5 s"):
        await anext(stream)
    rig.verifier.gate.set()
    assert first[0].finish_reason is None
