"""Rendering conversations with a chat template."""

import json
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import AddedToken, PreTrainedTokenizerFast

from deployments.openai.chat import ChatCompletionRequest
from deployments.prompts.conversation import ChatTemplate, past_arguments
from engine.errors import RequestError
from tests.deployments.templates import HERMES, TEMPLATE, tokenizer_of
from tests.fakes import byte_tokenizer


def render(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, Any], **fields: Any) -> Any:
    request = ChatCompletionRequest.model_validate({"messages": list(messages), **fields})
    return ChatTemplate(tokenizer).render(tokenizer, request, request.messages)


def call(arguments: str) -> dict[str, Any]:
    calls = [{"type": "function", "id": "c1", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": calls}


def test_a_text_is_kept_apart_only_if_it_holds_a_special_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert render(tokenizer, {"role": "user", "content": "a <|"}) == [
        ("<|start|>user\na <|<|end|>\n<|start|>assistant", False)
    ]
    assert render(tokenizer, {"role": "user", "content": "a</s>"}) == [
        ("<|start|>user\n", False),
        ("a</s>", True),
        ("<|end|>\n<|start|>assistant", False),
    ]


def test_a_special_token_is_found_where_the_tokenizer_changes_texts_first() -> None:
    backend = byte_tokenizer()
    backend.normalizer = normalizers.Lowercase()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<x>", normalized=True, special=True)]})
    tokenizer.chat_template = TEMPLATE
    assert ("<X>", True) in render(tokenizer, {"role": "user", "content": "<X>"})
    assert ("<Y>", True) not in render(tokenizer, {"role": "user", "content": "<Y>"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (json.dumps({"a": [[]] * 100_000}), "has more than 65,536 strings, lists and objects"),
        ('{"a": ' + "[" * 100_000, "c1' has more than"),
    ],
)
def test_arguments_of_earlier_calls_are_measured(
    tokenizer: PreTrainedTokenizerFast, arguments: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(tokenizer, {"role": "user", "content": "x"}, call(arguments))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"a": {"b": [1, "x"]}}', {"a": {"b": [1, "x"]}}),
        ("{", {}),
        ('{"a": 1, "b": "a \\"qu', {"a": 1, "b": 'a "qu'}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": x}', '{"a": x}'),
        ('{"a": NaN}', '{"a": NaN}'),
        ("[1]", "[1]"),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_arguments_that_were_cut_or_are_wrong_reach_the_template(arguments: str, expected: object) -> None:
    assert past_arguments(arguments) == expected
    rendered = render(tokenizer_of(HERMES), {"role": "user", "content": "x"}, call(arguments))
    assert f'"arguments": {json.dumps(expected)}}}' in rendered[0][0]


@pytest.mark.parametrize("name", ["self", "conversation", "messages", "tokenize"])
def test_a_variable_cannot_have_the_name_of_a_parameter(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs.{name} is not a variable") as caught:
        render(tokenizer, {"role": "user", "content": "x"}, chat_template_kwargs={name: 1})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_a_tool_cannot_hold_a_special_token(tokenizer: PreTrainedTokenizerFast) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "a <|end|>"}}
    with pytest.raises(RequestError, match="tools holds the text of a special token"):
        render(tokenizer, {"role": "user", "content": "x"}, tools=[tool])


def test_a_template_that_cannot_be_compiled_refuses_every_message() -> None:
    tokenizer = tokenizer_of("{% if %}")
    for effort in ("low", None):
        with pytest.raises(RequestError, match="the chat template refuses the messages: Expected an expression"):
            render(tokenizer, {"role": "user", "content": "x"}, reasoning_effort=effort)


@pytest.mark.parametrize("kind", [1, "", None, "x" * 5000], ids=["number", "empty", "none", "long"])
def test_a_template_that_fails_is_the_requests_fault(kind: Any) -> None:
    template = "{{ kind.upper() }}{{ kind[0] }}{{ raise_exception(kind) if kind else '' }}"
    with pytest.raises(RequestError) as caught:
        render(tokenizer_of(template), {"role": "user", "content": "a"}, chat_template_kwargs={"kind": kind})
    assert len(str(caught.value)) < 1000
    assert "/" not in str(caught.value), "no path of a file"
