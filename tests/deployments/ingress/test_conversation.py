"""Rendering conversations with a chat template."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter
from tokenizers import normalizers
from transformers import AddedToken, PreTrainedTokenizerFast

from deployments.ingress.conversation import ChatTemplate
from deployments.openai.chat_template import Rendering
from deployments.openai.messages import ChatMessage
from deployments.openai.tools import Tool
from engine.errors import RequestError
from tests.deployments.templates import TEMPLATE
from tests.fakes import byte_tokenizer


def render(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, Any], tools: tuple[Tool, ...] = ()) -> Any:
    parsed = TypeAdapter(list[ChatMessage]).validate_python(list(messages))
    texts = [message.text() for message in parsed]
    return ChatTemplate(tokenizer).render(tokenizer, parsed, texts, Rendering(tools=list(tools)))


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
        ("{", "are not JSON"),
        ("[]", "are not a JSON object"),
        (json.dumps({"a": [[]] * 100_000}), "has more than 65,536 values"),
        ('{"a": ' + "[" * 100_000, "nested more than 64 deep"),
    ],
)
def test_arguments_of_earlier_calls_are_measured_and_parsed(
    tokenizer: PreTrainedTokenizerFast, arguments: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(tokenizer, {"role": "user", "content": "x"}, call(arguments))
    assert caught.value.param == "messages"


def test_a_tool_cannot_hold_a_special_token(tokenizer: PreTrainedTokenizerFast) -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "description": "a <|end|>"}})
    with pytest.raises(RequestError, match="tools holds the text of a special token"):
        render(tokenizer, {"role": "user", "content": "x"}, tools=(tool,))
