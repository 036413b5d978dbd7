"""Calls, replies and breaks, without sockets."""

import asyncio

import pytest

from cluster.protocol.messages import MalformedMessageError
from cluster.transport import ConnectionLostError, DeadlineError, PeerGoneError
from tests.cluster.fakes import FakeLink
from tests.cluster.wire import ping, pong


async def test_every_call_gets_its_own_reply():
    link = FakeLink(pong)
    replies = await asyncio.gather(*(link.call(ping(number)) for number in range(1, 9)))
    assert [reply.round for reply in replies] == list(range(1, 9))
    assert not link._calls


async def test_a_call_without_a_reply_ends_with_its_deadline():
    link = FakeLink(lambda request: None)
    with pytest.raises(DeadlineError, match=r"^no reply to round 4 within 0\.05 s$"):
        await link.call(ping(4, deadline_s=0.05))
    assert not link._calls


async def test_a_post_waits_for_no_reply():
    link = FakeLink(lambda request: None)
    await link.post(ping(1))
    assert [request.round for request in link.requests] == [1]


async def test_a_break_ends_the_waiting_calls_and_is_reported():
    reasons: list[str] = []
    link = FakeLink(lambda request: None, on_break=reasons.append)
    waiting = asyncio.create_task(link.call(ping(1)))
    await asyncio.sleep(0)
    link.break_connection("reset by peer")
    with pytest.raises(ConnectionLostError, match="reset by peer"):
        await waiting
    assert reasons == ["reset by peer"]
    await link.post(ping(2))


async def test_closing_ends_waiting_and_later_calls_and_is_not_reported():
    reasons: list[str] = []
    link = FakeLink(lambda request: None, on_break=reasons.append)
    waiting = asyncio.create_task(link.call(ping(1)))
    await asyncio.sleep(0)
    link.close("process 9 died")
    link.break_connection("reset by peer")
    for call in (waiting, link.call(ping(2)), link.post(ping(3))):
        with pytest.raises(PeerGoneError, match="process 9 died"):
            await call
    assert reasons == []


async def test_too_large_a_request_is_not_sent(monkeypatch):
    monkeypatch.setattr("cluster.protocol.messages.MAX_MESSAGE_BYTES", 10)
    link = FakeLink(pong)
    with pytest.raises(MalformedMessageError, match="the limit is 10"):
        await link.call(ping(1, released=["x" * 20]))
    assert link.requests == []
