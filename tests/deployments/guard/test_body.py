"""Parsing bodies: counted first, large ones one at a time."""

import asyncio
import json

import httpx
import pytest

from deployments.guard import body
from deployments.guard.body import MAX_VALUES, SMALL_BYTES, Bodies, check_size
from deployments.openai.types import MAX_KEYS
from engine.errors import RequestError

LARGE = json.dumps({"prompt": "x" * 2 * SMALL_BYTES}).encode()


@pytest.mark.parametrize("value", [{"a": [1, "é", None]}, {"a": "x" * 2 * SMALL_BYTES}, [], "x"])
async def test_a_body_becomes_its_value(value: object) -> None:
    assert await Bodies().parse(json.dumps(value, ensure_ascii=False).encode()) == value
    assert await Bodies().parse(b"\xef\xbb\xbf" + json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"a": \xff}', json.dumps({"a": 1}).encode("utf-16"), b" ", b"[" * 5000, b"9" * 5000, rb'"\ud800"'],
)
async def test_a_body_that_is_no_json_in_utf_8_is_refused(content: bytes) -> None:
    with pytest.raises(RequestError, match="the body is not valid JSON: "):
        await Bodies().parse(content)


@pytest.mark.parametrize("item", ["[]", "{}", '""', '"a": 1', r'"\"[{"'])
async def test_a_body_that_holds_too_much_is_never_parsed(monkeypatch: pytest.MonkeyPatch, item: str) -> None:
    def of(count: int) -> bytes:
        start, end = "{}" if ":" in item else "[]"
        return f"{start}{','.join([item] * count)}{end}".encode()

    await Bodies().parse(of(MAX_VALUES - 1))
    monkeypatch.setattr(body, "from_json", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(RequestError, match="the body has more than 65,536 strings, lists and objects"):
        await Bodies().parse(of(MAX_VALUES))


def test_only_values_count() -> None:
    for value in ('[{"' * 2**17, list(range(2**17)), "\\"):
        check_size(json.dumps(value).encode(), "it")


async def test_large_bodies_take_turns_and_small_ones_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    monkeypatch.setattr(body, "_parse", lambda content: order.append(len(content)))
    bodies = Bodies()
    large = [asyncio.create_task(bodies.parse(LARGE + b" " * number)) for number in range(4)]
    await asyncio.sleep(0)
    await bodies.parse(b"{}")
    assert order == [len(LARGE), 2]
    large[1].cancel()  # nobody waits for it
    await asyncio.wait(large)
    assert order == [len(LARGE), 2, len(LARGE) + 2, len(LARGE) + 3]


@pytest.mark.parametrize("field", [None, "logit_bias", "stream_options"])
async def test_an_object_of_many_keys_is_one_error(client: httpx.AsyncClient, field: str | None) -> None:
    keys = {str(number): [] for number in range(MAX_KEYS + 1)}
    response = await client.post("/v1/completions", json=keys if field is None else {"prompt": "a", field: keys})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert "at most" in error["message"]
    assert len(error["message"]) < 500


async def test_a_route_gets_the_value_that_was_parsed(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "_parse", lambda _: {"prompt": 1.5})
    response = await client.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
