"""Conversations: renders messages and tools with the model's chat template; clients cannot write special tokens.

The template's own special tokens must survive, so a message with the text of a special token is replaced by a random
stand-in while the template is rendered.
"""

import inspect
import json
import re
import secrets
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError
from jinja2.meta import find_undeclared_variables
from pydantic_core import from_json

from deployments.guard.body import check_size
from deployments.openai.conversation_fields import (
    AssistantMessage,
    ChatMessage,
    ConversationRequest,
    ReasoningEffort,
    ToolMessage,
)
from deployments.openai.tools import PastCall
from engine.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TEMPLATE_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Raised by templates that expect other variables or messages."""

_SWITCHES = {"reasoning_effort", "enable_thinking", "thinking"}
"""Variables of chat templates that say how much, or whether, the model thinks."""

Segment = tuple[str, bool]
"""A part of a rendered template, and whether a client wrote it, so that special tokens in it are split."""


class ChatTemplate:
    """The chat template of one tokenizer. Its methods take tens of milliseconds for a long conversation."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._special_tokens = _special_tokens(tokenizer)
        functions = (type(tokenizer).apply_chat_template, render_jinja_template, Template.render)
        self._reserved = {"messages"}.union(*(inspect.signature(function).parameters for function in functions))

    def render(self, tokenizer: Any, request: ConversationRequest, messages: Sequence[ChatMessage]) -> list[Segment]:
        """Return the rendered messages of a request, up to where the answer starts; `tokenizer` is this thread's.

        Raises RequestError if the template refuses them, or a tool, a call or a variable holds a special token.
        """
        variables = request.template_variables()
        for name in sorted(variables.keys() & self._reserved):
            field = f"chat_template_kwargs.{name}"
            raise RequestError(f"{field} is not a variable that a request may set", field)
        if variables:
            self._check_plain(tokenizer, variables, "chat_template_kwargs")
        tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools]
        if tools:
            self._check_plain(tokenizer, tools, "tools")
        stand_ins: dict[str, str] = {}
        conversation = [self._entry(tokenizer, message, stand_ins) for message in messages]
        begins = request.add_generation_prompt is not False and not request.continue_final_message
        try:
            rendered: str = tokenizer.apply_chat_template(
                conversation,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=begins,
                continue_final_message=bool(request.continue_final_message),
                **{**_effort(tokenizer, request.reasoning_effort, tools), **variables},
            )
        except TemplateError as error:
            raise RequestError(f"the chat template refuses the messages: {str(error)[:500]}", "messages") from None
        except _TEMPLATE_FAILURES as error:
            field = "chat_template_kwargs" if variables else "messages"
            raise RequestError(f"the chat template fails with this request: {str(error)[:200]}", field) from None
        return _segments(rendered, stand_ins)

    def _entry(self, tokenizer: Any, message: ChatMessage, stand_ins: dict[str, str]) -> dict[str, Any]:
        """Return a message for the template."""
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": self._harmless(tokenizer, message.text(), stand_ins)}
        if message.name:
            entry["name"] = message.name
        match message:
            case ToolMessage():
                entry["tool_call_id"] = message.tool_call_id
                self._check_plain(tokenizer, message.tool_call_id, "messages")
            case AssistantMessage():
                if message.reasoning_content is not None:
                    entry["reasoning_content"] = self._harmless(tokenizer, message.reasoning_content, stand_ins)
                if message.tool_calls:
                    entry["tool_calls"] = [_past_call(call) for call in message.tool_calls]
                    if message.text():  # else the template may get the thoughts by this name, too, and refuse both
                        entry["thinking"] = ""
                    self._check_plain(tokenizer, entry["tool_calls"], "messages")
        return entry

    def _harmless(self, tokenizer: Any, text: str, stand_ins: dict[str, str]) -> str:
        """Return a message's text, or a stand-in if it contains a special token."""
        if not self._holds_special_token(tokenizer, text):
            return text
        # Letters and digits only: no template or normalizer changes them. Random: no client can guess it.
        stand_in = f"text{secrets.token_hex(16)}"
        stand_ins[stand_in] = text
        return stand_in

    def _check_plain(self, tokenizer: Any, value: object, field: str) -> None:
        """Refuse special tokens where the template writes JSON, which allows no stand-in."""
        if self._holds_special_token(tokenizer, json.dumps(value, ensure_ascii=False)):
            raise RequestError(f"{field} holds the text of a special token where only plain text is allowed", field)

    def _holds_special_token(self, tokenizer: Any, text: str) -> bool:
        if self._special_tokens is not None:
            return self._special_tokens.search(text) is not None
        plain = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return bool(plain != tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"])


def _special_tokens(tokenizer: "PreTrainedTokenizerFast") -> re.Pattern[str] | None:
    """Return an expression that finds special tokens; None if texts are normalized first, which would hide some."""
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    if any(token.normalized for token in tokens) and tokenizer.backend_tokenizer.normalizer is not None:
        return None
    return re.compile("|".join(re.escape(token.content) for token in tokens) or r"(?!)")


def _effort(tokenizer: Any, effort: ReasoningEffort | None, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the variables that tell the chat template an effort; raise RequestError if it reads none of them."""
    if effort is None:
        return {}
    switches = _switches_of(tokenizer.get_chat_template(tools=tools or None))
    if not switches:
        reason = f"the chat template reads none of {', '.join(sorted(_SWITCHES))}"
        raise RequestError(f"reasoning_effort is {effort!r}, but {reason}", "reasoning_effort")
    return {name: effort if name == "reasoning_effort" else effort != "none" for name in switches}


@cache
def _switches_of(template: str) -> set[str]:
    """Return which of the switches a chat template reads."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _SWITCHES & find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))


def _segments(rendered: str, stand_ins: dict[str, str]) -> list[Segment]:
    """Replace the stand-ins by their texts; a template may omit some, such as thoughts."""
    if not stand_ins:
        return [(rendered, False)]
    parts = re.split(f"({'|'.join(stand_ins)})", rendered)
    return [(stand_ins.get(part, part), part in stand_ins) for part in parts]


def _past_call(call: PastCall) -> dict[str, Any]:
    """Return a call for the template, with its arguments as an object if possible."""
    text = call.function.arguments
    check_size(text.encode(), f"the arguments of call {call.id[:100]!r}", "messages")
    function = {"name": call.function.name, "arguments": past_arguments(text)}
    return {"id": call.id, "type": "function", "function": function}


def past_arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments of an earlier call as an object, which templates expect.

    It holds as much of a cut call as the model wrote. Arguments that are no JSON object stay text.
    """
    try:
        arguments = from_json(text or "{}", allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text
