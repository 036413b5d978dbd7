"""Parsing bodies: one large one at a time, measured first."""

import asyncio
import json

import httpx
import pytest

from deployments.config import Limits
from deployments.ingress import body
from deployments.ingress.body import SMALL_BYTES, Bodies
from deployments.ingress.outline import Bounds
from engine.errors import RequestError

BOUNDS = Bounds.of(Limits(), 100)
LARGE = json.dumps({"prompt": "x" * 2 * SMALL_BYTES}).encode()


@pytest.mark.parametrize("value", [{"a": [1, "é", None]}, {"a": "x" * 2 * SMALL_BYTES}, [], "x"])
async def test_a_body_becomes_what_it_says(value: object) -> None:
    assert await Bodies(lambda: BOUNDS).parse(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"a": \xff}', json.dumps({"a": 1}).encode("utf-16"), json.dumps({"a": 1}).encode("utf-16-le"), b" "],
)
async def test_what_is_no_json_in_utf_8_is_refused(content: bytes) -> None:
    with pytest.raises(RequestError, match="the body is not valid JSON"):
        await Bodies(lambda: BOUNDS).parse(content)


async def test_a_byte_order_mark_is_passed_over() -> None:
    assert await Bodies(lambda: BOUNDS).parse(b"\xef\xbb\xbf{}") == {}


async def test_a_body_that_holds_too_much_is_never_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_from_json", lambda _: pytest.fail("it was parsed"))
    for content in ({"prompt": [[]] * 200_000}, {"messages": [{}] * 2000}, {"tokens": [-1] * 101}):
        with pytest.raises(RequestError, match="has more than"):
            await Bodies(lambda: BOUNDS).parse(json.dumps(content).encode())


async def test_large_bodies_take_turns_and_small_ones_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    monkeypatch.setattr(body, "_from_json", lambda content: order.append(len(content)))
    bodies = Bodies(lambda: BOUNDS)
    large = [asyncio.create_task(bodies.parse(LARGE)) for _ in range(3)]
    await asyncio.sleep(0)
    await bodies.parse(b"{}")
    assert order[-1] == 2
    assert len(order) <= 2
    await asyncio.gather(*large)
    assert order.count(len(LARGE)) == 3


async def test_a_body_that_nobody_waits_for_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    monkeypatch.setattr(body, "_from_json", lambda content: order.append(len(content)))
    bodies = Bodies(lambda: BOUNDS)
    first, second, third = (asyncio.create_task(bodies.parse(LARGE + b" " * number)) for number in range(3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([first, second, third])
    assert order == [len(LARGE), len(LARGE) + 2]


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        ("/v1/completions", {"prompt": [[]] * 65}, "prompt"),
        ("/v1/chat/completions", {"messages": [{}] * 1025}, "messages"),
        ("/v1/responses", {"input": [{}] * 1025}, "input"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * 1025}, "messages"),
        ("/detokenize", {"tokens": [-1] * 513}, "tokens"),
    ],
)
async def test_every_route_measures_its_body(
    client: httpx.AsyncClient, path: str, content: dict[str, object], param: str
) -> None:
    response = await client.post(path, json=content)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert "has more than" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        ("/v1/completions", {"prompt": [[]] * 64}, "prompt.0"),
        ("/v1/chat/completions", {"messages": [{"role": "x"}] * 1000}, "messages.0.role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 60_000}]}, "messages.0.content.0"),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages.0.role"),
        ("/detokenize", {"tokens": [-1] * 512}, "tokens.0"),
    ],
)
async def test_the_first_wrong_item_of_a_list_is_the_one_that_is_named(
    client: httpx.AsyncClient, path: str, content: dict[str, object], param: str
) -> None:
    response = await client.post(path, json=content)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
