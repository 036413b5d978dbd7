"""The sub-layers that a self-draft skips, as users write them: a list, words, or a file that lists them."""

import json
import re
from pathlib import Path

from engine.errors import ConfigError

SETTING = "self_draft_skip"
_NAME = re.compile(r"(attention|mlp)\.(0|[1-9][0-9]*)")


def read_skip_list(value: object) -> object:
    """Return the names as a tuple; other types are returned as they are, to be refused by their type.

    Args:
        value: a list of names; names with blanks or commas between them; or `@` and the path of a JSON file that holds
            a list, or an object with one under `self_draft_skip`.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    if isinstance(value, str) and value.startswith("@"):
        value = _read(Path(value[1:]))
    if isinstance(value, str):
        value = value.replace(",", " ").split()
    return tuple(value) if isinstance(value, list) else value


def check_names(names: tuple[str, ...]) -> None:
    """Check that these are names of sub-layers, and some.

    Raises:
        ConfigError: the message says what is wrong.
    """
    if wrong := [name for name in names if not _NAME.fullmatch(name)]:
        raise ConfigError(f"{SETTING} has {wrong[0]!r}; a sub-layer is attention.N or mlp.N, N counted from 0")
    if not names:
        raise ConfigError(f"{SETTING} is empty; a draft that skips nothing costs as much as the target's own token")


def layer_of(name: str) -> int:
    """Return the index of a sub-layer's layer."""
    return int(name.partition(".")[2])


def _read(path: Path) -> list[object]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{SETTING}: cannot read {path}: {error}") from error
    names = content.get(SETTING) if isinstance(content, dict) else content
    if not isinstance(names, list):
        raise ConfigError(f"{SETTING}: {path} holds neither a list nor an object with one under {SETTING!r}")
    return names
