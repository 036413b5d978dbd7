"""Counting what a body holds without parsing it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.config import Limits
from deployments.ingress import outline
from deployments.ingress.outline import MAX_DEPTH, MAX_KEYS, Bounds, Outline
from engine.errors import PromptTooLongError, RequestError

BOUNDS = Bounds.of(
    Limits(max_messages=5, max_prompts=4, max_stop=3, max_logit_bias=2, max_values=2000), max_model_len=100
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=20,
)


def read(body: bytes | dict[str, Any], bounds: Bounds = BOUNDS) -> int:
    """Read a body; returns how often others could run."""
    return len(list(Outline(body if isinstance(body, bytes) else json.dumps(body).encode(), bounds).read()))


@pytest.mark.parametrize(
    ("body", "message", "field"),
    [
        ({"messages": [{}] * 6}, "messages has more than 5 entries, at most 5 are allowed", "messages"),
        ({"input": [1] * 6}, "input has more than 5 entries", "input"),
        ({"prompt": [[]] * 5}, "prompt has more than 4 entries", "prompt"),
        ({"prompt": ["a"] * 5}, "prompt has more than 4 entries", "prompt"),
        ({"prompt": [{}] * 5}, "prompt has more than 4 entries", "prompt"),
        ({"prompt": [1] * 101}, "prompt has more than 100 token ids, the model takes 100", "prompt"),
        ({"prompt": [[1], [1] * 101]}, "prompt has more than 100 token ids", "prompt"),
        ({"prompt": [1, 2, 3, 4, "a", 5]}, "prompt has more than 4 entries", "prompt"),
        ({"tokens": [-1] * 101}, "tokens has more than 100 entries", "tokens"),
        ({"stop": ["a"] * 4}, "stop has more than 3 entries", "stop"),
        ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias has more than 2 entries", "logit_bias"),
        ({"tools": [1] * 129}, "tools has more than 128 entries", "tools"),
        ({str(number): None for number in range(MAX_KEYS + 1)}, "an object has more than 1,024 entries", None),
        ({"other": [1] * 2000}, "the body has more than 2,000 values", None),
        ({"other": ["a"] * 1998}, "the body has more than 2,000 values", None),
        ({"other": [[]] * 1998}, "the body has more than 2,000 values", None),
        (b"[" * (MAX_DEPTH + 1), "nested more than 64 deep", None),
        (b'{"seed": ' + b"9" * 1025 + b"}", "a number of more than 1,024 characters", None),
        (b'{"m\\u0065ssages": [1,1,1,1,1,1]}', "messages has more than 5 entries", "messages"),
        (b'{"messages": [1], "messages": [1,1,1,1,1,1]}', "messages has more than 5 entries", "messages"),
        (
            b'{"a": "\\"messages\\": [", "messages" : [1, 1 ,\n1,1,1, 1]}',
            "messages has more than 5 entries",
            "messages",
        ),
    ],
)
def test_what_is_too_much_is_refused_by_name(body: bytes | dict[str, Any], message: str, field: str | None) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read(body)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{}] * 5, "prompt": [1] * 100, "tokens": [1] * 100, "stop": ["a"] * 3},
        {"prompt": [[1] * 100] * 4},
        {"prompt": "a, b, [c, {d" * 1000, "stop": 'x",' * 1000},
        {"prompt": "[" * 100, "other": {"messages": [1] * 6, "prompt": [1] * 101}},
        {"stop": [",,,,\\", "a", "b"]},
        {"logit_bias": {}, "messages": []},
        {"other": [1] * 1999},  # the numbers at both ends of a list do not count
        {"other": ["a"] * 1997},
        {"other": [[]] * 1997},
        {str(number): None for number in range(MAX_KEYS)},
        b"[" * MAX_DEPTH,
        b'{"seed": ' + b"9" * 1024 + b"}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_at_a_limit_passes(body: bytes | dict[str, Any]) -> None:
    read(body)


def test_too_many_token_ids_are_a_prompt_that_is_too_long() -> None:
    with pytest.raises(PromptTooLongError):
        read({"prompt": [1] * 101})


def test_token_ids_are_not_counted_while_the_model_is_not_known() -> None:
    read({"prompt": [1] * 5000}, Bounds.of(Limits(), None))


@given(content=st.binary(max_size=60) | st.text('{}[]",:\\ 1a', max_size=60).map(str.encode))
def test_any_bytes_come_to_an_end(content: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "SLICE_BYTES", 3)
        read(content)


@given(value=JSON, slice_bytes=st.integers(2, 40))
def test_the_longest_list_decides_however_the_body_is_cut(value: Any, slice_bytes: int) -> None:
    body = json.dumps({"messages": value}).encode()
    most = len(value) if isinstance(value, list | dict) else 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "SLICE_BYTES", slice_bytes)
        read(body, Bounds({"messages": max(1, most)}, 1, None, 10_000))
        if most > 1:
            with pytest.raises(RequestError, match="messages has more"):
                read(body, Bounds({"messages": most - 1}, 1, None, 10_000))


def test_others_can_run_while_a_large_body_is_read() -> None:
    large = Bounds.of(Limits(max_values=2**20), None)
    for body in ({"a": "x" * 2**20}, {"a": '"' * 2**20}, {"prompt": [1] * 2**19}, {"a": [[]] * 2**18}):
        size = len(json.dumps(body))
        assert read(body, large) >= size // outline.SLICE_BYTES - 1


def test_a_list_that_is_too_long_is_not_read_to_its_end() -> None:
    for item in ("{}", "[]", '"a"', "1"):
        body = f'{{"messages": [{",".join([item] * 500_000)}]}}'.encode()
        reader = Outline(body, BOUNDS).read()
        with pytest.raises(RequestError):
            next(reader)
