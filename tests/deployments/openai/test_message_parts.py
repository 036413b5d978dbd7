"""A message's parts: a text is read the same however it is cut, and no later than it must be."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.openai.message_parts import CallArguments, CallStart, Content, MessageParser
from deployments.openai.tools import MessageForm, Tool
from deployments.prompts.message_forms import form_of
from tests.deployments import templates

HERMES, LLAMA3 = (form_of(templates.tokenizer_of(text)) for text in (templates.HERMES, templates.LLAMA))
TOOLS = [Tool.model_validate({"type": "function", "function": {"name": "f"}})]

Read = tuple[str, list[tuple[str, str]]]


def read(form: MessageForm, pieces: list[str], *, calls_only: bool = False) -> Read:
    reader = MessageParser(form, tools=TOOLS, calls_only=calls_only)
    text = ""
    calls: list[tuple[str, str]] = []
    for i, piece in enumerate(pieces):
        for item in reader.feed(piece, is_last=i == len(pieces) - 1):
            match item:
                case CallStart():
                    calls.append((item.name, ""))
                case CallArguments():
                    calls[-1] = (calls[-1][0], calls[-1][1] + item.text)
                case _:
                    text += item.text
    return text, calls


ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TRICKY = r'<tool_call>{"name": "g", "arguments": {"s": "</tool_call>}\"{"}}</tool_call>'
G = ("g", r'{"s": "</tool_call>}\"{"}')
F = ("f", '{"a": 1}')
LLAMA = '{"name": "f", "parameters": {"a": 1}}'
HERMES_TEXTS = [
    ("", "", []),
    (f"Well:\n{ONE}\n{ONE}\n", "Well:\n", [F, F]),
    (f"{TRICKY}{ONE}", "", [G, F]),
    (f"{ONE}\n two  words {ONE} \n", "two  words ", [F, F]),
    # Other orders and keys.
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>x', "x", [F]),
    ('<tool_call>{"type": "function", "name": "f", "arguments": {"a": 1}, "x": [1, "}"]}</tool_call>', "", [F]),
    ('<tool_call>{"id": 7, "name": "f", "arguments": {"a": 1}}</tool_call>', "", [F]),
    # What only begins like a call.
    ("a <tool_ b <tool_call", "a <tool_ b <tool_call", []),
    ("<tool_call>", "<tool_call>", []),
    (f"<tool_call>{{not json}}</tool_call>{ONE}", "<tool_call>{not json}</tool_call>", [F]),
    ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    (
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        [],
    ),
    *(
        (call := f'<tool_call>{{"arguments": {{"a": {value}}}, "name": "f"}}</tool_call>', call, [])
        for value in ("NaN", '"\\ud800"')  # no JSON, no text
    ),
    ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    (f"<tool_call>{ONE}", "<tool_call>", [F]),
    # What a limit cuts, or a model gets wrong, once it has begun.
    ('<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}', "", [F]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_', "", [F]),
    (f'<tool_call>{{"name": "f", "arguments": {{"a": 1}}</tool_call>{ONE}', "", [F, F]),
    (f'<tool_call>{{"name": "f", "arguments": {{"a": [1</tool_call>{ONE}', "", [("f", '{"a": [1'), F]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}} and so on', "and so on", [F]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1} and so on', "and so on", [F]),
]
LLAMA3_TEXTS = [
    ("", "", []),
    ("hello {", "hello {", []),
    (f" {LLAMA}", "", [F]),
    (f"<|python_tag|>{LLAMA}; {LLAMA}\n", "", [F, F]),
    ('<|python_tag|>{"type": "function", "name": "f", "arguments": {"a": 1}};\n' + LLAMA, "", [F, F]),
    ('{"parameters": {"a": 1}, "name": "f"}', "", [F]),
    ("<|python_tag|>print(1)", "print(1)", []),
    ("<|python", "<|python", []),
    ('{"name": "f"}', '{"name": "f"}', []),
    ('{"a": 1}, {', '{"a": 1}, {', []),
    ('{"a": 1}' + LLAMA, '{"a": 1}' + LLAMA, []),
    ("{" * 3000, "{" * 3000, []),
    ('{"name": "f", "para', '{"name": "f", "para', []),
    ('{"name": "f", "parameters": {"a": 1}', "", [F]),
    (f"{LLAMA}; hello", "; hello", [F]),
]
CASES: Any = [(HERMES, *case) for case in HERMES_TEXTS] + [(LLAMA3, *case) for case in LLAMA3_TEXTS]


@pytest.mark.parametrize(("form", "text", "expected", "calls"), CASES)
def test_a_text_is_read_the_same_letter_by_letter(form: Any, text: str, expected: str, calls: Any) -> None:
    assert read(form, [text]) == (expected, calls)
    assert read(form, [*text, ""]) == (expected, calls)


FRAGMENTS = st.sampled_from(
    [
        *["<tool_call>", "</tool_call>", "<|python_tag|>", ";", "{", "}", "}}", '"', "\\", ",", "[", "]", "<", "text"],
        *(
            "\n",
            " ",
            '{"name": "f", "arguments": ',
            '{"name": "f", "parameters": {"a": ',
            '{"arguments": {}, "name": "g"}',
        ),
        *(ONE, TRICKY, LLAMA),
    ]
)


@given(st.sampled_from([HERMES, LLAMA3]), st.lists(FRAGMENTS, max_size=12), st.data())
def test_any_text_is_read_the_same_however_it_is_cut(
    form: MessageForm, fragments: list[str], data: st.DataObject
) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert read(form, pieces) == read(form, [text]) == read(form, [*text, ""])


@given(st.sampled_from([HERMES, LLAMA3]), st.text("<tool_cal>/|pyhng{}\"';, \n", max_size=60))
def test_a_text_without_a_call_loses_no_character(form: MessageForm, text: str) -> None:
    assert read(form, [*text, ""]) == (text, [])


def test_nothing_is_held_back_longer_than_it_must_be() -> None:
    reader = MessageParser(HERMES, tools=TOOLS)
    assert reader.feed("hello <", is_last=False) == [Content("hello ")]
    assert reader.feed("b>", is_last=False) == [Content("<b>")]
    assert reader.feed('<tool_call>\n{"name": "f", "arguments": ', is_last=False) == []
    (start, *rest) = reader.feed('{"a": "b', is_last=False)
    assert isinstance(start, CallStart)
    assert start.name == "f"
    assert rest == [CallArguments(0, '{"a": "b')]
    assert reader.feed('c</t"', is_last=False) == [CallArguments(0, 'c</t"')]
    assert reader.feed("}}\n</tool_call>\nbye", is_last=False) == [CallArguments(0, "}"), Content("bye")]
    assert MessageParser(LLAMA3, tools=TOOLS).feed("hello", is_last=False) == [Content("hello")]


def test_a_text_that_must_be_calls_has_no_content() -> None:
    for form, text, _, calls in CASES:
        assert read(form, [text], calls_only=True) == ("", calls)
