"""Conversations: renders messages and tools with the model's chat template; clients cannot write special tokens.

In a rendered template, the template's own special tokens must survive. So a message that contains the text of a special
token is replaced by a random stand-in while the template is rendered.
"""

import inspect
import json
import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from deployments.ingress.outline import Bounds, Outline
from deployments.openai.chat_template import Rendering
from deployments.openai.fields import check_json
from deployments.openai.messages import AssistantMessage, ChatMessage, ToolMessage
from deployments.openai.tools import PastCall
from engine.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ARGUMENTS = Bounds({}, max_prompts=1, max_model_len=None, max_values=2**16)
"""What the arguments of one call in an earlier answer may hold."""

_TEMPLATE_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template may raise if the client's variables or messages are not what it expects."""

Segment = tuple[str, bool]
"""A part of a rendered template, and whether special tokens in it are split, because a client wrote it."""


class ChatTemplate:
    """The chat template of one tokenizer. Its methods take tens of milliseconds for a long conversation."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._special_tokens = _special_tokens(tokenizer)
        self._taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}

    def render(
        self, tokenizer: Any, messages: Sequence[ChatMessage], texts: Sequence[str], rendering: Rendering
    ) -> list[Segment]:
        """Return a conversation as the template renders it, up to where the answer starts.

        Args:
            tokenizer: that of this thread.
            texts: the texts of the messages.

        Raises:
            RequestError: the template refuses the conversation, or a tool, a call or a variable holds a special token.
        """
        self._check_variables(tokenizer, rendering.variables)
        offered = [tool.model_dump(exclude_none=True) for tool in rendering.tools]
        if offered:
            self._check_plain(tokenizer, offered, "tools")
        stand_ins: dict[str, str] = {}
        conversation = []
        for message, text in zip(messages, texts, strict=True):
            role = "system" if message.role == "developer" else message.role
            entry: dict[str, Any] = {"role": role, "content": self._harmless(tokenizer, text, stand_ins)}
            if message.name:
                entry["name"] = message.name
            if isinstance(message, ToolMessage):
                entry["tool_call_id"] = message.tool_call_id
                self._check_plain(tokenizer, message.tool_call_id, "messages")
            if isinstance(message, AssistantMessage):
                if message.reasoning_content is not None:
                    entry["reasoning_content"] = self._harmless(tokenizer, message.reasoning_content, stand_ins)
                if message.tool_calls:
                    entry["tool_calls"] = [_past_call(call) for call in message.tool_calls]
                    self._check_plain(tokenizer, entry["tool_calls"], "messages")
            conversation.append(entry)
        return _segments(_render(tokenizer, conversation, offered, rendering), stand_ins)

    def _harmless(self, tokenizer: Any, text: str, stand_ins: dict[str, str]) -> str:
        """Return a message's text, or a stand-in for it if it contains the text of a special token."""
        if not self._holds_special_token(tokenizer, text):
            return text
        # Letters and digits only: no template or normalizer changes them. Random: no client can guess it.
        stand_in = f"text{secrets.token_hex(16)}"
        stand_ins[stand_in] = text
        return stand_in

    def _check_variables(self, tokenizer: Any, variables: dict[str, Any]) -> None:
        """Refuse variables that are the server's to set, or that hold the text of a special token."""
        field = "chat_template_kwargs"
        for name in variables.keys() & self._taken:
            raise RequestError(f"{field}.{name} is not a variable that a request may set", f"{field}.{name}")
        if variables:
            self._check_plain(tokenizer, variables, field)

    def _check_plain(self, tokenizer: Any, value: object, field: str) -> None:
        """Refuse the text of special tokens in what the template writes as JSON, where no stand-in is possible."""
        if self._holds_special_token(tokenizer, json.dumps(value, ensure_ascii=False)):
            raise RequestError(f"{field} holds the text of a special token where only plain text is allowed", field)

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


def _render(
    tokenizer: Any, conversation: list[dict[str, Any]], tools: list[dict[str, Any]], rendering: Rendering
) -> str:
    try:
        rendered: str = tokenizer.apply_chat_template(
            conversation,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=rendering.begins_answer,
            continue_final_message=rendering.continues_last,
            **rendering.variables,
        )
    except TemplateError as error:
        raise RequestError(f"the chat template refuses the messages: {str(error)[:500]}", "messages") from None
    except _TEMPLATE_FAILURES as error:
        field = "chat_template_kwargs" if rendering.variables else "messages"
        raise RequestError(f"the chat template fails with this request: {str(error)[:200]}", field) from None
    return rendered


def _segments(rendered: str, stand_ins: dict[str, str]) -> list[Segment]:
    """Put the texts back in place of their stand-ins; a template may leave some out, as many do with thoughts."""
    if not stand_ins:
        return [(rendered, False)]
    parts = re.split(f"({'|'.join(stand_ins)})", rendered)
    return [(stand_ins.get(part, part), part in stand_ins) for part in parts]


def _past_call(call: PastCall) -> dict[str, Any]:
    """Return a call as chat templates expect it: with its arguments as an object."""
    text = call.function.arguments or "{}"
    try:
        for _ in Outline(text.encode(), ARGUMENTS).read():
            pass
        arguments = check_json(json.loads(text))
    except RequestError as error:
        raise RequestError(f"the arguments of call {call.id[:100]!r}: {error}", "messages") from None
    except ValueError as error:
        raise RequestError(f"the arguments of call {call.id[:100]!r} are not JSON: {error}", "messages") from None
    if not isinstance(arguments, dict):
        raise RequestError(f"the arguments of call {call.id[:100]!r} are not a JSON object", "messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
