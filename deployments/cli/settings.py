"""The table of settings: every name, its default and its meaning, in Markdown."""

from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deployments.config import AppConfig
from engine.config import PAIR_SETTINGS


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Yield the name and the field of each setting; a nested setting's name is `outer.inner`."""
    fields = PAIR_SETTINGS | {name: field for name, field in AppConfig.model_fields.items() if name != "pair"}
    for name, field in fields.items():
        if not isinstance(field.default, BaseModel):
            yield name, field
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from ((f"{name}.{inner}", inner_field) for inner, inner_field in option.model_fields.items())


def settings_table() -> str:
    """Return all settings as a table in Markdown."""
    rows = [
        (f"`{name}`", f"`{field.get_default(call_default_factory=True)}`", " ".join((field.description or "").split()))
        for name, field in settings()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [("setting", "default", "meaning"), ("---",) * 3, *rows])
