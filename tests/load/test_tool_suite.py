"""The tool-call suite: every fault that a server can make is counted, and a server without faults has none."""

import json

import pytest

from tests.load.tool_cases import KINDS, cases
from tests.load.tool_suite import Message, faults

CASES = {case.kind: case for case in cases(len(KINDS), max_tokens=9, max_bytes=None)}
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
def test_an_answer_is_judged(kind, message, found):
    assert [fault[: len(word)] for fault, word in zip(faults(CASES[kind], message), found, strict=True)] == found
