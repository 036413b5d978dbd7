"""The README cannot rot: its table, its tree, its commands and its code are compared with the repository, or run."""

import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deployments.config import AppConfig
from engine.config import PAIR_SETTINGS, PairConfig
from tests.docstrings import field_docstrings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SETTINGS = (ROOT / "deployments" / "README.md").read_text()
PACKAGES = ("engine", "cluster", "deployments")
MAX_LINES = 220


def configuration_table() -> str:
    """The table as `deployments/README.md` should have it: the pair's settings first, as arguments like all others."""
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
    outer = ((name, field.default) for name, field in AppConfig.model_fields.items() if name != "pair")
    return [(name, type(value).model_fields) for name, value in outer if isinstance(value, BaseModel)]


def one_line(description: str | None) -> str:
    return " ".join((description or "").split())


def code_blocks(language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [code for tag, code in blocks if tag == language]


def paths_in(tree: str) -> set[str]:
    """The files and folders that a tree names.

    A package starts a line, its files and folders are indented by two blanks. A line names files (`one.py, two.py`), or
    a folder and, after a colon, its modules and folders, which may go on in the next line.
    """
    lines = re.sub(r",\n {4,}", ", ", tree).splitlines()
    paths: set[str] = set()
    package = ""
    for line in lines:
        if not line.startswith(" "):
            package = line.split()[0]
            continue
        words = line.split()
        names = [*takewhile(lambda word: word.endswith(","), words)]
        names.append(words[len(names)])
        paths |= {package + name.rstrip(",") for name in names}
        if (folder := names[0]).endswith("/") and ": " in line:
            children = line.rsplit(": ", 1)[1].split(", ")
            paths |= {package + folder + (name if name.endswith("/") else f"{name}.py") for name in children}
    return paths


def paths_of(package: str) -> set[str]:
    """The modules of a package and of its folders, and the folders themselves."""
    folder = ROOT / package
    modules = {path for pattern in ("*.py", "*/*.py") for path in folder.glob(pattern) if path.name != "__init__.py"}
    folders = {path for pattern in ("*/", "*/*/") for path in folder.glob(pattern) if any(path.glob("*.py"))}
    names = {str(path.relative_to(ROOT)) for path in modules} | {f"{path.relative_to(ROOT)}/" for path in folders}
    return {name for name in names if "__pycache__" not in name}


def test_the_configuration_tables_are_the_codes():
    assert configuration_table() in SETTINGS
    assert nested_table() in SETTINGS


def test_every_argument_is_described():
    assert field_docstrings(PairConfig).keys() == PAIR_SETTINGS.keys()
    assert all(field.description for field in AppConfig.model_fields.values())
    assert all(field.description for _, nested in nested_settings() for field in nested.values())


def test_every_file_the_readme_names_exists():
    named = set(re.findall(r"`((?:engine|cluster|deployments|tests)/[\w/]+\.py)`", README))
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tree_names_every_module_of_a_package_and_of_its_folders(package: str):
    (tree,) = (block for block in code_blocks("") if block.startswith("engine/"))
    named = {path for path in paths_in(tree) if path.startswith(f"{package}/")}
    assert paths_of(package) - named == set()
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_a_tree_names_files_folders_and_modules():
    lines = (
        "engine/  A library.",
        "  one.py, two.py  Files",
        "  room/  A: b: three,",
        "         four, five/",
        "  pair/  Data",
    )
    folders = {"engine/room/", "engine/room/five/", "engine/pair/"}
    modules = {"engine/one.py", "engine/two.py", "engine/room/three.py", "engine/room/four.py"}
    assert paths_in("\n".join(lines)) == folders | modules


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
