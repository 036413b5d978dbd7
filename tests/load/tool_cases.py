"""Tool cases: conversations, functions and schemas, as people send them and as nobody would, by number."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .prompts import SHARED_PROMPTS, Prompt, read_prompts

KINDS = ("auto", "auto strict", "required", "required parallel", "named", "json_schema", "json_object")
"""Ways to ask: in the first the model may do what it wants, in all others its arguments follow the schema."""
_WORDS = ("city", "größe", "名前", "user id", "amount", "a.b", "tags", "naïve", "emoji🙂", 'quo"te', "x_y", "ключ")
_FORECAST = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Oslo", "São Paulo", "東京"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"anyOf": [{"const": "C"}, {"const": "F"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
_ORDER = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 3},
        "note": {"type": "string", "maxLength": 40},
    },
    "required": ["items"],
    "additionalProperties": False,
    "$defs": {
        "item": {
            "type": "object",
            "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "gift": {"type": "boolean"}},
            "required": ["sku", "gift"],
            "additionalProperties": False,
        }
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation; `fields` are those of its request that all its variants share."""

    index: int
    kind: str
    fields: dict[str, Any]
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the functions' arguments by name; of the answer itself under the empty name."""


def cases(num_cases: int, *, max_tokens: int, max_bytes: int | None) -> list[Case]:
    """Return the conversations, whose prompts are the shared data sets' that are there, and the bundled ones.

    Args:
        max_bytes: of messages and tools together; functions that do not fit are left out.
    """
    shared = [path.stem for path in sorted(SHARED_PROMPTS.glob("*.jsonl"))]
    prompts = read_prompts([*shared, "bundled"], seed=0)
    return [_case(index, prompts, random.Random(index), max_tokens, max_bytes) for index in range(num_cases)]


def _case(index: int, prompts: Sequence[Prompt], rng: random.Random, max_tokens: int, max_bytes: int | None) -> Case:
    kind = KINDS[index % len(KINDS)]
    messages = _messages(prompts[index % len(prompts)], rng, (max_bytes or 4000) // 3)
    fields: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "seed": index}
    fields["temperature"] = rng.choice([0.0, 0.7, 1.0])
    if kind.startswith("json"):
        schema = {"type": "object"} if kind == "json_object" else _object(rng, 2)
        named = {} if kind == "json_object" else {"json_schema": {"name": "answer", "schema": schema, "strict": True}}
        return Case(index, kind, fields | {"response_format": {"type": kind, **named}}, {"": schema})
    room = None if max_bytes is None else max_bytes - len(json.dumps(messages, ensure_ascii=False).encode())
    tools = _tools(rng, room, is_strict="strict" in kind)
    name = rng.choice(tools)["function"]["name"]
    choice = {"type": "function", "function": {"name": name}} if kind == "named" else kind.split()[0]
    fields |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": kind == "required parallel"}
    return Case(index, kind, fields, {t["function"]["name"]: t["function"]["parameters"] for t in tools})


def _messages(prompt: Prompt, rng: random.Random, num_chars: int) -> list[dict[str, Any]]:
    """Return a conversation that ends with a prompt: alone, after a system message, or after a call and its result."""
    last = prompt.content if isinstance(prompt.content, list) else [{"role": "user", "content": prompt.content}]
    last = [{**message, "content": str(message["content"])[:num_chars]} for message in last]
    shape = rng.randrange(3)
    if shape == 1:
        return [
            {"role": "system", "content": "Réponds en français — 用工具。 \\n is no newline, </tool> no tag."},
            *last,
        ]
    if shape == 2:
        function = {"name": "forecast", "arguments": json.dumps({"city": "東京", "days": 2}, ensure_ascii=False)}
        call = {"id": "call_0", "type": "function", "function": function}
        asked = [
            {"role": "user", "content": "Rain in 東京?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        return [*asked, {"role": "tool", "tool_call_id": "call_0", "content": '{"rain": [0.1, "🙂"]}'}, *last]
    return last


def _tools(rng: random.Random, max_bytes: int | None, *, is_strict: bool) -> list[dict[str, Any]]:
    generated = [(f"f{number}-{rng.randrange(99)}", _object(rng, 2)) for number in range(rng.choice([0, 1, 3, 40]))]
    functions = [("forecast", _FORECAST), ("place_order", _ORDER), *generated]
    rng.shuffle(functions)
    tools: list[dict[str, Any]] = []
    for name, schema in functions:
        function = {"name": name, "description": f"Does {name} ✓", "parameters": schema}
        tool = {"type": "function", "function": function | ({"strict": True} if is_strict else {})}
        if tools and max_bytes is not None and len(json.dumps([*tools, tool], ensure_ascii=False).encode()) > max_bytes:
            break
        tools.append(tool)
    return tools


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    required = names if rng.random() < 0.5 else names[:1]
    properties = {name: _schema(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    simple: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 12},
        {"type": "string", "minLength": 30, "maxLength": 90},
        {"type": "string", "enum": ["a\nb", "ü", "🙂🙃", 'say "hi"', "back\\slash", "<tool_call>"]},
        {"type": "integer", "minimum": -20, "maximum": 1000},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "boolean"},
        {"type": ["boolean", "null"]},
        {"enum": [0, 1.5, "1", None, True]},
    ]
    if depth == 0 or rng.random() < 0.6:
        return rng.choice(simple)
    if rng.random() < 0.5:
        return {"type": "array", "items": _schema(rng, depth - 1), "minItems": rng.randint(0, 2), "maxItems": 4}
    return _object(rng, depth - 1)
