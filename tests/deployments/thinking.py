"""A model whose thoughts end with a token, and whose chat template begins them, ends them or leaves it to the model."""

import json
from pathlib import Path
from typing import Any

from tests.deployments.templates import HERMES, save_tokenizer

TEMPLATE = (
    HERMES + "{% if enable_thinking is not defined %}<think>{% elif not enable_thinking %}<think>\n<|end|>{% endif %}"
)
RESPONSES: dict[str, Any] = {
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "<|end|>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
ONE = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
"""A schema of short answers."""
BIAS = {"258": 19.0}
"""So that the token that ends thoughts comes once in a while."""


def save_thinking(path: Path, **fields: Any) -> None:
    """Save the model's tokenizer; `fields` replace those of its response template."""
    save_tokenizer(TEMPLATE, path)
    file = path / "tokenizer_config.json"
    template = RESPONSES | {"fields": RESPONSES["fields"] | fields}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"response_template": template}))
