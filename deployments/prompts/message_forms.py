"""How a model writes messages: `form_of` chooses a response template for its chat template.

A tokenizer can bring a template (`response_template`). For other tokenizers, `message_forms.json` lists ways to write
thoughts, found by their marks in the chat template, and calls, found by reading a call that the chat template wrote.
"""

import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.openai.message_parts import CallArguments, CallStart, MessageParser
from deployments.openai.structured_output import Thoughts
from deployments.openai.tools import CALLS, THOUGHTS, MessageForm, Tool, ToolForm
from deployments.prompts.conversation import ChatTemplate, past_arguments, template_of
from deployments.prompts.template_input import PROBE_ARGUMENTS, PROBE_TOOL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("ray.serve")  # the only logger that Serve shows


def form_of(tokenizer: "PreTrainedTokenizerFast") -> MessageForm | None:
    """Return how a model writes messages; None if unknown, so that all text is content."""
    if not tokenizer.chat_template:
        return None
    chat_template = template_of(tokenizer, has_tools=True)
    thoughts: dict[str, Any] = {}
    for way in reversed(_known()["thoughts"]):
        thoughts = way if all(marker in chat_template for marker in way["markers"]) else thoughts
    takes_tools = re.search(r"\btools\b", chat_template) is not None
    if takes_tools and (call := ChatTemplate(tokenizer).call_of(tokenizer)):
        for calls in _known()["calls"]:
            form = _form(tokenizer, thoughts, calls, takes_tools=True)
            if form is not None and _reads(form, *call):
                return form
    return _form(tokenizer, thoughts, {}, takes_tools=takes_tools)


def _reads(form: MessageForm, prompt: str, answer: str) -> bool:
    parts = MessageParser(form, prompt=prompt, tools=[Tool.model_validate(PROBE_TOOL)]).feed(answer, is_last=True)
    names = [part.name for part in parts if isinstance(part, CallStart)]
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    return names == ["probe"] and past_arguments(arguments) == PROBE_ARGUMENTS


def _form(
    tokenizer: "PreTrainedTokenizerFast", thoughts: dict[str, Any], calls: dict[str, Any], *, takes_tools: bool
) -> MessageForm | None:
    own_template = _own_template(tokenizer)
    known = _known()
    call_field = known["call_field"] | calls["field"] if calls else None
    known_fields = {"reasoning_content": thoughts.get("field"), CALLS: call_field}
    template = own_template or {"start_anchor_pattern": known["start_anchor_pattern"], "fields": known_fields}
    fields: dict[str, Any] = {
        name: field for name, field in template["fields"].items() if field and (takes_tools or name != CALLS)
    }
    if not fields:
        return None
    dropped = "|".join(way["dropped"] for way in (thoughts, calls) if "dropped" in way)
    text = json.dumps([fields, dropped], ensure_ascii=False).replace("\\", "")
    marks = {id: token for id, token in tokenizer.added_tokens_decoder.items() if token.content in text}
    if own_template and calls and calls["field"].get("open", "\0") not in text:
        return None  # the template reads calls of another form
    if not own_template:
        dropped = dropped or "|".join(re.escape(token.content) for token in marks.values() if token.special)
        fields["content"] = {"content": "text", **({"close_pattern": dropped} if dropped else {})}
    field: dict[str, Any] = next((fields[name] for name in THOUGHTS if name in fields), {})
    delimiters = thoughts.get("thoughts") if field else None
    if isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
        delimiters = {"opening": field["open"], "closing": field["close"]}
    ids = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
    form = ToolForm(**calls["tool_form"], token_ids=ids) if "tool_form" in calls else None
    ways = Thoughts(**delimiters, token_ids=ids) if delimiters else None
    head = calls["field"]["open_pattern"] + r"\s*(?=\{)" if calls.get("streams") else calls.get("head", "")
    return MessageForm({**template, "fields": fields}, head, form, tuple(marks), ways)


def _own_template(tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any] | None:
    template: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    try:
        if template is not None:
            MessageForm(template).streaming  # noqa: B018
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        logger.error("the tokenizer's response_template cannot be used: %s", error)
        return None
    return template


@cache
def _known() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(Path(__file__).with_name("message_forms.json").read_text(encoding="utf-8"))
    return known
