"""Conversations: renders messages and tools with the model's chat template; clients cannot write special tokens.

The template's own special tokens must survive, so a message with the text of a special token is replaced by a random
stand-in while the template is rendered.
"""

import inspect
import itertools
import json
import re
import secrets
from collections.abc import Sequence
from functools import cache, partial
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
from deployments.prompts.template_input import (
    FAILURES,
    PROBE_CALL,
    PROBE_TOOL,
    PROBE_USER,
    Entry,
    Render,
    arrange,
    input_of,
)
from engine.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SWITCHES = {"reasoning_effort", "enable_thinking", "thinking"}  # variables of chat templates

Segment = tuple[str, bool]  # a part of a rendered template; whether a client wrote it, so that special tokens are split


class ChatTemplate:
    """The chat template of one tokenizer. Its methods take tens of milliseconds for a long conversation."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._special_tokens = _special_tokens(tokenizer)
        functions = (type(tokenizer).apply_chat_template, render_jinja_template, Template.render)
        self._reserved = {"messages"}.union(*(inspect.signature(function).parameters for function in functions))
        self._reads = {
            template: input_of(partial(_render, tokenizer, template, add_generation_prompt=True))
            for template in {template_of(tokenizer, has_tools=has_tools) for has_tools in (False, True)}
        }

    def render(self, tokenizer: Any, request: ConversationRequest, messages: Sequence[ChatMessage]) -> list[Segment]:
        """Return the messages up to where the answer starts, by this thread's tokenizer, or raise RequestError."""
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
        entries = [self._entry(tokenizer, message, stand_ins) for message in messages]
        template = template_of(tokenizer, has_tools=bool(tools))
        reads = self._reads[template]
        begins = request.add_generation_prompt is not False and not request.continue_final_message
        flags = {"add_generation_prompt": begins, "continue_final_message": bool(request.continue_final_message)}
        try:
            variables = _effort(template, request.reasoning_effort) | variables
            render: Render = partial(_render, tokenizer, template, **flags, **variables)
            arranged = arrange(reads, render, entries, tools)
            return _segments(render(reads.messages(arranged), reads.tools(tools)), stand_ins)
        except TemplateError as error:
            raise RequestError(f"the chat template refuses the messages: {str(error)[:500]}", "messages") from None
        except FAILURES as error:
            field = "chat_template_kwargs" if request.chat_template_kwargs else "messages"
            raise RequestError(f"the chat template fails with this request: {str(error)[:200]}", field) from None

    def call_of(self, tokenizer: Any) -> tuple[str, str] | None:
        """Return a prompt that offers a tool, and a call as the template writes it; None if it does not write both."""
        template = template_of(tokenizer, has_tools=True)
        reads = self._reads[template]
        render, tools = partial(_render, tokenizer, template), reads.tools([PROBE_TOOL])
        try:
            prompt = render(reads.messages([PROBE_USER]), tools, add_generation_prompt=True)
            whole = render(reads.messages([PROBE_USER, PROBE_CALL]), tools)
        except FAILURES:
            return None
        before, answer = answer_in(prompt, whole, tokenizer.all_special_tokens)
        return (before, answer) if "probe" in before and "probe" in answer else None

    def _entry(self, tokenizer: Any, message: ChatMessage, stand_ins: dict[str, str]) -> dict[str, Any]:
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": self._harmless(tokenizer, message.text(), stand_ins)}
        if message.name:
            entry["name"] = message.name
        match message:
            case ToolMessage():
                entry["tool_call_id"] = message.tool_call_id
                self._check_plain(tokenizer, message.tool_call_id, "messages")
            case AssistantMessage():
                if message.thoughts is not None:
                    entry["reasoning_content"] = self._harmless(tokenizer, message.thoughts, stand_ins)
                if message.tool_calls:
                    entry["tool_calls"] = [_past_call(call) for call in message.tool_calls]
                    if message.text():  # else the template may get the thoughts by this name, too, and refuse both
                        entry["thinking"] = ""
                    self._check_plain(tokenizer, entry["tool_calls"], "messages")
        return entry

    def _harmless(self, tokenizer: Any, text: str, stand_ins: dict[str, str]) -> str:
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


def template_of(tokenizer: "PreTrainedTokenizerFast", *, has_tools: bool) -> str:
    """Return the chat template that transformers takes; of named templates without a default, the first."""
    named: Any = tokenizer.chat_template
    if not isinstance(named, dict):
        return str(named)
    name = next((name for name in ("tool_use" if has_tools else "default", "default") if name in named), min(named))
    return str(named[name])


def answer_in(prompt: str, whole: str, ends: Sequence[str]) -> tuple[str, str]:
    """Split a rendered conversation into the beginning that it shares with `prompt`, and the answer without `ends`."""
    # The shared beginning may end inside a tag.
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
    start = len(re.sub(r"[<\[][^<>\[\]]*\Z", "", "".join(letter for letter, _ in same)))
    answer = whole[start:].rstrip()
    while end := next((end for end in ends if answer.endswith(end)), None):
        answer = answer.removesuffix(end).rstrip()
    return whole[:start], answer


def _render(
    tokenizer: Any, template: str, messages: list[Entry], tools: list[Entry] | None, /, **variables: Any
) -> str:
    chosen = {"tools": tools, "chat_template": template, "tokenize": False}
    return str(tokenizer.apply_chat_template(messages, **chosen, **variables))


def _special_tokens(tokenizer: "PreTrainedTokenizerFast") -> re.Pattern[str] | None:
    """Return a pattern of all special tokens; None if texts are normalized first, which would hide some."""
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    if any(token.normalized for token in tokens) and tokenizer.backend_tokenizer.normalizer is not None:
        return None
    return re.compile("|".join(re.escape(token.content) for token in tokens) or r"(?!)")


def _effort(template: str, effort: ReasoningEffort | None) -> dict[str, Any]:
    """Return the variables of an effort; raise RequestError if the chat template reads no such variable."""
    if effort is None:
        return {}
    switches = _switches_of(template)
    if not switches and (effort != "none" or "think" in template):
        reason = f"the chat template reads none of {', '.join(sorted(_SWITCHES))}"
        raise RequestError(f"reasoning_effort is {effort!r}, but {reason}", "reasoning_effort")
    return {name: effort if name == "reasoning_effort" else effort != "none" for name in switches}


@cache
def _switches_of(template: str) -> set[str]:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _SWITCHES & find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))


def _segments(rendered: str, stand_ins: dict[str, str]) -> list[Segment]:
    """Replace the stand-ins by their texts; a template may omit some, such as thoughts."""
    if not stand_ins:
        return [(rendered, False)]
    parts = re.split(f"({'|'.join(stand_ins)})", rendered)
    return [(stand_ins.get(part, part), part in stand_ins) for part in parts]


def _past_call(call: PastCall) -> dict[str, Any]:
    text = call.function.arguments
    check_size(text.encode(), f"the arguments of call {call.id[:100]!r}", "messages")
    function = {"name": call.function.name, "arguments": past_arguments(text), "text": text or "{}"}
    return {"id": call.id, "type": "function", "function": function}


def past_arguments(text: str) -> dict[str, Any] | str:
    """Return an earlier call's arguments, whole or cut, as an object; text that is not a JSON object stays text."""
    try:
        arguments = from_json(text or "{}", allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text
