"""Texts of grammars: from JSON schemas, regular expressions, choices and other notations; imports llguidance."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from engine.blocks.block_pool import salt_digest
from engine.errors import RequestError

MAX_GBNF_RULES = 1000
"""Converting more rules to Lark's notation takes seconds, because each may depend on the next."""
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,32}", "lenient": False}
"""JSON may be indented, but white space is bounded so that a model cannot produce it without end."""
_ENFORCED_FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
)
"""Other formats are annotations (JSON Schema 2020-12, 7.2.1), which llguidance would refuse."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"const", "enum", "default", "examples"})


def without_annotations(schema: Any) -> Any:
    """Return a JSON schema without the formats that the grammar does not enforce."""
    if isinstance(schema, list):
        return [without_annotations(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            kept[key] = {name: without_annotations(part) for name, part in value.items()}
        elif key != "format" or not isinstance(value, str) or value in _ENFORCED_FORMATS:
            kept[key] = value if key in _DATA else without_annotations(value)
    return kept


def from_json_schema(schema: dict[str, Any]) -> str:
    """Return the grammar of a JSON schema; raise RequestError if the schema is not valid JSON."""
    try:
        text = json.dumps(without_annotations(schema), allow_nan=False)
        return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not valid: {error}", "json") from None


def from_regex(pattern: str) -> str:
    """Return the grammar of texts that a regular expression fully matches."""
    return LLMatcher.grammar_from_regex(pattern)


def from_choice(texts: Sequence[str]) -> str:
    """Return the grammar of exactly these texts."""
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(literal, texts)))


def literal(text: str, token_ids: Mapping[str, int] | None = None) -> str:
    """Return a text in Lark's notation, in which strings of `token_ids` stand for these tokens."""
    ids = token_ids or {}
    tokens = "|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or "(?!)"
    # A Lark literal is a JSON string in which DEL is escaped, too.
    return " ".join(
        f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False).replace("\x7f", "\\u007f")
        for part in re.split(f"({tokens})", text)
        if part or not text
    )


def from_text(text: str) -> str:
    """Return the grammar of a text in Lark's or llama.cpp's (GBNF) notation; raise RequestError if it is neither."""
    if (num_rules := text.count("::=")) > MAX_GBNF_RULES:
        raise RequestError(f"the grammar has {num_rules:,} rules in GBNF, at most {MAX_GBNF_RULES:,} are allowed")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # noqa: BLE001 - the converter raises bare exceptions
        raise RequestError(f"the grammar is neither Lark nor GBNF: {error}", "grammar") from None


def salted(grammar: str, salt: str | None) -> str:
    """Return an equal grammar with its own cache entry per salt: users cannot tell what others have compiled."""
    if salt is None:
        return grammar
    digest = salt_digest(salt).hex()
    return f'{grammar[:-1]},"salt":"{digest}"}}' if grammar.startswith("{") else f"{grammar}\n// {digest}"
