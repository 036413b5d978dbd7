"""The README cannot rot: its configuration table and its tree are compared with the code."""

import re
from pathlib import Path

from pydantic import BaseModel

from deployments.config import AppConfig
from engine.config import PAIR_SETTINGS, PairConfig
from tests.docstrings import field_docstrings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def configuration_table():
    """The table as the README should have it: the pair's settings first, as arguments like all others."""
    rows = ["| argument | default | meaning |", "|---|---|---|"]
    for name, meaning in field_docstrings(PairConfig).items():
        rows.append(f"| `{name}` | `{PAIR_SETTINGS[name].default}` | {meaning} |")
    for name, field in AppConfig.model_fields.items():
        if name == "pair":
            continue
        default = field.default
        shown = "see `config.py`" if isinstance(default, BaseModel) else f"`{default}`"
        rows.append(f"| `{name}` | {shown} | {' '.join((field.description or '').split())} |")
    return "\n".join(rows)


def test_the_configuration_table_is_the_codes():
    assert configuration_table() in README


def test_every_argument_is_described():
    assert field_docstrings(PairConfig).keys() == PAIR_SETTINGS.keys()
    assert all(field.description for field in AppConfig.model_fields.values())


def test_every_file_the_readme_names_exists():
    named = set(re.findall(r"`((?:engine|cluster|deployments|tests)/[\w/]+\.py)`", README))
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
