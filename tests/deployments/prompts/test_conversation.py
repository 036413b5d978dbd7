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


USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "description": "a <|end|>"}}
FAILING = "{{ kind.upper() }}{{ kind[0] }}{{ raise_exception(kind) if kind else '' }}"
NO_VARIABLE = "chat_template_kwargs.{0} is not a variable"


@pytest.mark.parametrize(
    ("template", "messages", "fields", "message"),
    [
        (TEMPLATE, [USER, call(json.dumps({"a": [[]] * 100_000}))], {}, "more than 65,536 strings, lists and objects"),
        (TEMPLATE, [USER, call('{"a": ' + "[" * 100_000)], {}, "c1' has more than"),
        *(
            (TEMPLATE, [USER], {"chat_template_kwargs": {name: 1}}, NO_VARIABLE.format(name))
            for name in ("self", "conversation", "messages", "tokenize")
        ),
        (TEMPLATE, [USER], {"tools": [TOOL]}, "tools holds the text of a special token"),
        ("{% if %}", [USER], {}, "the chat template refuses the messages: Expected an expression"),
        ("{% if %}", [USER], {"reasoning_effort": "low"}, "the chat template refuses the messages: Expected an"),
        *(
            (FAILING, [USER], {"chat_template_kwargs": {"kind": kind}}, "the chat template")
            for kind in (1, "", None, "x" * 5000)
        ),
    ],
)
def test_what_cannot_be_rendered_is_the_requests_fault(
    template: str, messages: list[Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(tokenizer_of(template), *messages, **fields)
    assert len(str(caught.value)) < 1000
    assert "/" not in str(caught.value), "no path of a file"
    assert caught.value.param
