"""The README cannot rot: its table, its tree, its commands and its code are compared with the repository, or run."""

import re
import shlex
from inspect import isclass
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deployments.config import AppConfig
from engine.config import PAIR_SETTINGS, PairConfig
from tests.docstrings import field_docstrings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SETTINGS = (ROOT / "deployments" / "docs" / "settings.md").read_text()
PAGES = [page for page in sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("**/*.md")) if page[:5] != ".venv"]
PACKAGES = ("engine", "cluster", "deployments")
MAX_LINES = 130


def configuration_table() -> str:
    """The table as `docs/settings.md` should have it: the pair's settings first, as arguments like all others."""
    rows = ["| argument | default | meaning |", "|---|---|---|"]
    for name, meaning in field_docstrings(PairConfig).items():
        rows.append(f"| `{name}` | `{PAIR_SETTINGS[name].default}` | {meaning} |")
    for name, field in AppConfig.model_fields.items():
        if name == "pair":
            continue
        shown = "see below" if isinstance(field.default, BaseModel) else f"`{field.default}`"
        rows.append(f"| `{name}` | {shown} | {one_line(field.description)} |")
    return "\n".join(rows)


def nested_table() -> str:
    """The table of the settings inside others."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for outer, nested in nested_settings():
        for name, field in nested.items():
            rows.append(f"| `{outer}.{name}` | `{field.default}` | {one_line(field.description)} |")
    return "\n".join(rows)


def nested_settings() -> list[tuple[str, dict[str, FieldInfo]]]:
    """The settings that have settings inside, and those."""
    outer = ((name, field.annotation) for name, field in AppConfig.model_fields.items() if name != "pair")
    types = [(name, part) for name, annotation in outer for part in get_args(annotation) or [annotation]]
    return [(name, part.model_fields) for name, part in types if isclass(part) and issubclass(part, BaseModel)]


def one_line(description: str | None) -> str:
    return " ".join((description or "").split())


def code_blocks(language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [code for tag, code in blocks if tag == language]


def folders_in(tree: str) -> set[str]:
    """The folders that a tree names: a package starts a line, its folders are indented by two blanks."""
    folders: set[str] = set()
    package = ""
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            package = name
        elif name.endswith("/"):
            folders.add(package + name)
    return folders


def test_the_configuration_tables_are_the_codes():
    assert configuration_table() in SETTINGS
    assert nested_table() in SETTINGS


def test_every_argument_is_described():
    assert field_docstrings(PairConfig).keys() == PAIR_SETTINGS.keys()
    assert all(field.description for field in AppConfig.model_fields.values())
    assert all(field.description for _, nested in nested_settings() for field in nested.values())


@pytest.mark.parametrize("page", PAGES)
def test_every_file_a_page_names_exists(page: str):
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:engine|cluster|deployments|tests)/[\w/]+\.py)`", text)
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [link for link in linked if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_heading_a_page_links_to_exists(page: str):
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", (ROOT / page).read_text()):
        target = (ROOT / page).parent / path if path else ROOT / page
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, (path, anchor)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tree_has_a_line_for_each_folder(package: str):
    (tree,) = (block for block in code_blocks("") if block.startswith("engine/"))
    there = {
        f"{path.relative_to(ROOT)}/" for path in (ROOT / package).iterdir() if path.is_dir() and any(path.iterdir())
    }
    named = {path for path in folders_in(tree) if path.startswith(f"{package}/")}
    assert {name for name in there if "__pycache__" not in name} == named


def test_serve_run_takes_the_arguments_that_the_readme_shows():
    commands = re.findall(r"^serve run deployments:app (.+)$", README, re.MULTILINE)
    assert commands
    for command in commands:
        AppConfig.model_validate(dict(argument.split("=", 1) for argument in shlex.split(command)))


def test_the_library_example_runs(capsys: pytest.CaptureFixture[str]):
    (example,) = (block for block in code_blocks("python") if "import LLM" in block)
    exec(example.replace("LLM()", "LLM(compile='off')"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_the_readme_stays_short():
    assert len(README.splitlines()) <= MAX_LINES
