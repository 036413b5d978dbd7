"""Conversations: renders messages and tools with the model's chat template; clients cannot write special tokens.

In a rendered template, the template's own special tokens must survive. So a message that contains the text of a special
token is replaced by a random stand-in while the template is rendered.
"""

import json
import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from deployments.ingress.outline import Bounds, Outline
from deployments.openai.messages import ChatMessage
from deployments.openai.tools import PastCall, Tool
from engine.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ARGUMENTS = Bounds({}, max_prompts=1, max_model_len=None, max_values=2**16)
"""What the arguments of one call in an earlier answer may hold."""

Segment = tuple[str, bool]
"""A part of a rendered template, and whether special tokens in it are split, because a client wrote it."""


class ChatTemplate:
    """The chat template of one tokenizer. Its methods take tens of milliseconds for a long conversation."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._special_tokens = _special_tokens(tokenizer)

    def render(
        self, tokenizer: Any, messages: Sequence[ChatMessage], texts: Sequence[str], tools: Sequence[Tool]
    ) -> list[Segment]:
        """Return a conversation as the template renders it, up to where the answer starts.

        Args:
            tokenizer: that of this thread.
            texts: the texts of the messages.

        Raises:
            RequestError: the template refuses the conversation, or a tool or a call holds a special token.
        """
        offered = [tool.model_dump(exclude_none=True) for tool in tools]
        if offered:
            self._check_plain(tokenizer, offered, "tools")
        stand_ins: dict[str, str] = {}
        conversation = []
        for message, text in zip(messages, texts, strict=True):
            content = text
            if self._holds_special_token(tokenizer, text):
                # Letters and digits only: no template or normalizer changes them. Random: no client can guess it.
                content = f"text{secrets.token_hex(16)}"
                stand_ins[content] = text
            role = "system" if message.role == "developer" else message.role
            entry: dict[str, Any] = {"role": role, "content": content}
            if message.name:
                entry["name"] = message.name
            if message.tool_call_id is not None:
                entry["tool_call_id"] = message.tool_call_id
                self._check_plain(tokenizer, message.tool_call_id, "messages")
            if message.tool_calls is not None:
                entry["tool_calls"] = [_past_call(call) for call in message.tool_calls]
                self._check_plain(tokenizer, entry["tool_calls"], "messages")
            conversation.append(entry)
        return _segments(_render(tokenizer, conversation, offered), stand_ins)

    def _check_plain(self, tokenizer: Any, value: object, field: str) -> None:
        """Refuse the text of special tokens in what the template writes as JSON, where no stand-in is possible."""
        if self._holds_special_token(tokenizer, json.dumps(value, ensure_ascii=False)):
            raise RequestError(f"{field} holds the text of a special token in a tool or a call", field)

    def _holds_special_token(self, tokenizer: Any, text: str) -> bool:
        if self._special_tokens is not None:
            return self._special_tokens.search(text) is not None
        plain = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return bool(plain != tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"])


def _special_tokens(tokenizer: "PreTrainedTokenizerFast") -> re.Pattern[str] | None:
    """Return an expression that finds special tokens in a text.

    It is None if the tokenizer changes texts before it looks for them, so that it can find what is not there letter by
    letter.
    """
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    if any(token.normalized for token in tokens) and tokenizer.backend_tokenizer.normalizer is not None:
        return None
    return re.compile("|".join(re.escape(token.content) for token in tokens) or r"(?!)")


def _render(tokenizer: Any, conversation: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    try:
        rendered: str = tokenizer.apply_chat_template(
            conversation, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise RequestError(f"the chat template refuses the messages: {error}", "messages") from None
    return rendered


def _segments(rendered: str, stand_ins: dict[str, str]) -> list[Segment]:
    """Put the texts back in place of their stand-ins."""
    segments = []
    for stand_in, text in stand_ins.items():
        before, _, rendered = rendered.partition(stand_in)
        segments += [(before, False), (text, True)]
    return [*segments, (rendered, False)]


def _past_call(call: PastCall) -> dict[str, Any]:
    """Return a call as chat templates expect it: with its arguments as an object."""
    try:
        for _ in Outline(call.function.arguments.encode(), ARGUMENTS).read():
            pass
        arguments = json.loads(call.function.arguments)
    except RequestError as error:
        raise RequestError(f"the arguments of call {call.id[:100]!r}: {error}", "messages") from None
    except ValueError as error:
        raise RequestError(f"the arguments of call {call.id[:100]!r} are not JSON: {error}", "messages") from None
    if not isinstance(arguments, dict):
        raise RequestError(f"the arguments of call {call.id[:100]!r} are not a JSON object", "messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
