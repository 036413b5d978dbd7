"""Grammars of every notation, over the JSON tokenizer, and whether a text belongs to one."""

import json
import re

import jsonschema

from engine.sampling.grammar_text import from_choice, from_json_schema, from_regex, from_text

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", None]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{2,5}(ab|12)*-[0-9]{3}"
CHOICES = ["abc", "abcabc", "ab12", "true", "{}"]
GRAMMARS = {
    "json": from_json_schema(SCHEMA),
    "regex": from_regex(REGEX),
    "choice": from_choice(CHOICES),
    "gbnf": from_text('root ::= "[" item ("," item)? "]"\nitem ::= [a-c]+ | root'),
    "lark": from_text('start: "{" start "}" | /[0-9]{1,3}/'),
}


def matches(name, text):
    if name == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if name == "choice":
        return text in CHOICES
    patterns = {"regex": REGEX, "gbnf": r"[\[\]a-c,]+", "lark": r"\{*[0-9]{1,3}\}*"}
    return re.fullmatch(patterns[name], text) is not None and text.count("{") == text.count("}")
