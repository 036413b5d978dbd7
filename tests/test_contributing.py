"""The recipes of the contributing guide name files and names that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
RECIPES = dict(re.findall(r"^## (Add .+)\n\n((?:\d\. .+\n)+)", GUIDE, re.MULTILINE))


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_has_five_lines_and_names_what_exists(title: str):
    steps = RECIPES[title].splitlines()
    assert len(steps) == 5
    for step in steps:
        path, names = re.match(r"\d\. `([^`]+)`: (.*)", step).groups()
        assert (ROOT / path).is_file(), path
        if path.endswith(".py") and (match := re.match(r"`(\w+)`", names)):
            assert match[1] in defined_names(ROOT / path), step


def test_all_recipes_are_there():
    assert len(RECIPES) == 4


def test_every_file_the_guide_names_exists():
    assert [path for path in re.findall(r"`([\w/]+\.(?:py|md))`", GUIDE) if not (ROOT / path).exists()] == []


def defined_names(path: Path) -> set[str]:
    """The classes, functions and constants of a module, and the names that it imports."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names
