"""The tool-call suite: every fault that a server can make is counted, and a server without faults has none."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.load.__main__ import main
from tests.load.client import Client
from tests.load.tool_cases import KINDS, cases
from tests.load.tool_suite import Message, faults

CASES = {case.kind: case for case in cases(len(KINDS), "bundled", seed=1, max_tokens=9, max_bytes=None)}
GOOD = json.dumps({"city": "Bern", "days": 2})


def said(*calls: list[str], content: str = "", finish_reason: str = "stop") -> Message:
    return Message(content, "", list(calls), finish_reason)


@pytest.mark.parametrize(
    ("kind", "message", "found"),
    [
        ("auto", said(content="no call"), []),
        ("auto", said(["forecast", "{"]), ["invalid JSON"]),
        ("auto", said(["forecast", '{"city": 1}']), []),
        ("auto strict", said(["forecast", '{"city": 1}']), ["schema"]),
        ("auto strict", said(["forecast", '{"city": NaN}']), ["invalid JSON"]),
        ("required", said(["forecast", GOOD]), []),
        ("required", said(["forcast", GOOD]), ["name"]),
        ("required", said(content="no call"), ["no call"]),
        ("required", said(["forecast", GOOD], ["forecast", '{"ci'], finish_reason="length"), []),
        ("json_object", said(content="{}"), []),
        ("json_object", said(content="[]"), ["schema"]),
        ("json_object", said(content="{}}"), ["invalid JSON"]),
    ],
)
def test_an_answer_is_judged(kind: str, message: Message, found: list[str]) -> None:
    assert [fault[: len(word)] for fault, word in zip(faults(CASES[kind], message), found, strict=True)] == found


def test_only_the_named_function_may_be_called() -> None:
    case = CASES["named"]
    names = {name: [name] for name in case.schemas}
    chosen = case.fields["tool_choice"]["function"]["name"]
    wrong = [name for name in names if any("name" in text[:4] for text in faults(case, said([name, GOOD])))]
    assert wrong == [name for name in names if name != chosen]


class FakeTransport(httpx.AsyncBaseTransport):
    """A server that calls what it is offered; it streams another byte, or knows no drafts, on demand."""

    def __init__(self, *, streams_wrong: bool = False, is_foreign: bool = False) -> None:
        self.streams_wrong, self.is_foreign = streams_wrong, is_foreign
        self.arms: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        body = json.loads(await request.aread())
        if self.is_foreign and "speculative" in body:
            return httpx.Response(400, json={})
        self.arms.append(json.dumps(body.get("speculative")))
        message: dict[str, Any] = {"content": "{}" if "response_format" in body else None}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if body.get("tool_choice", "auto") not in ("auto",):
            text = '{"x": 1}' if body["stream"] and self.streams_wrong else "{}"
            message["tool_calls"] = [{"index": 0, "id": "1", "function": {"name": "f", "arguments": text}}]
        if not body.get("stream"):
            return httpx.Response(200, json={"choices": [{**choice, "message": message}]})
        event = json.dumps({"choices": [{**choice, "delta": message}]})
        return httpx.Response(200, text=f"data: {event}\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    ("fields", "status", "arms"), [({}, 0, 3), ({"is_foreign": True}, 0, 1), ({"streams_wrong": True}, 1, 3)]
)
def test_the_exit_status_tells_of_faults(
    fields: Any,
    status: int,
    arms: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server, make = FakeTransport(**fields), Client.__init__

    def connect(self: Client, *words: Any, **options: Any) -> None:
        make(self, *words, **options)
        self.http = httpx.AsyncClient(transport=server, base_url=self.url)

    monkeypatch.setattr(Client, "__init__", connect)
    words = ["--calls", "7", "--prompts", "bundled", "--out", str(tmp_path / "faults.jsonl")]
    assert main(["tools", *words]) == status
    assert len(set(server.arms[2:])) == arms
    found = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()] if status else []
    assert {fault["found"].split(":")[0] for fault in found} == ({"differs"} if status else set())
    assert all(fault["variant"].endswith("streamed") and fault["body"]["tools"] for fault in found)
    assert "json_schema" in capsys.readouterr().out
