"""How a model writes messages: `form_of` chooses a response template for its chat template.

A tokenizer can bring a template (`response_template`). For others, `message_forms.json` has ways to write thoughts and
calls, each with the marks by which a chat template shows that it uses them. The first way that fits is taken.
"""

import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.openai.structured_output import Thoughts
from deployments.openai.tools import CALLS, THOUGHTS, MessageForm, ToolForm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows


def form_of(tokenizer: "PreTrainedTokenizerFast") -> MessageForm | None:
    """Return how a model writes messages; None if that is unknown, so that all its text is content."""
    chat_template = tokenizer.chat_template
    if not isinstance(chat_template, str):
        return None
    known, takes_tools = _known(), re.search(r"\btools\b", chat_template)
    thoughts = _first(known["thoughts"], chat_template)
    calls = _first(known["calls"], chat_template) if takes_tools else {}
    own = _own_template(tokenizer)
    known_fields = {"reasoning_content": thoughts.get("field"), CALLS: calls.get("field")}
    template = own or {"start_anchor_pattern": known["start_anchor_pattern"], "fields": known_fields}
    fields: dict[str, Any] = {
        name: field for name, field in template["fields"].items() if field and (takes_tools or name != CALLS)
    }
    if not fields:
        return None
    dropped = "|".join(way["dropped"] for way in (thoughts, calls) if "dropped" in way)
    text = json.dumps([fields, dropped], ensure_ascii=False).replace("\\", "")
    marks = {id: token for id, token in tokenizer.added_tokens_decoder.items() if token.content in text}
    if own and calls and calls["field"].get("open", "?") not in text:
        calls = {}  # the template may read calls of another form
    if not own:
        dropped = dropped or "|".join(re.escape(token.content) for token in marks.values() if token.special)
        fields["content"] = {"content": "text", **({"close_pattern": dropped} if dropped else {})}
    field: dict[str, Any] = next((fields[name] for name in THOUGHTS if name in fields), {})
    delimiters = thoughts.get("thoughts") if field else None
    if isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
        delimiters = {"opening": field["open"], "closing": field["close"]}
    ids = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
    form = ToolForm(**calls["tool_form"], token_ids=ids) if "tool_form" in calls else None
    ways = Thoughts(**delimiters, token_ids=ids) if delimiters else None
    return MessageForm({**template, "fields": fields}, calls.get("head", ""), form, tuple(marks), ways)


def _own_template(tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any] | None:
    """Return the template that comes with a tokenizer, if it can be used."""
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


def _first(ways: list[dict[str, Any]], chat_template: str) -> dict[str, Any]:
    return next((way for way in ways if all(marker in chat_template for marker in way["markers"])), {})
