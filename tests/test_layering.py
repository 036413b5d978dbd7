"""Imports go one way, deployments -> cluster -> engine, and each room stays free of what it must not know."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FORBIDDEN = {
    "engine": {"cluster", "deployments", "tests", "ray", "fastapi", "starlette", "httpx", "ssl"}
    | {"prometheus_client", "uvicorn", "cryptography", "socket"},
    "cluster": {"deployments", "tests", "fastapi", "starlette", "httpx", "prometheus_client", "uvicorn"},
    "deployments": {"tests", "ssl", "cryptography"},
}


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def imported_names(path: Path) -> Iterator[str]:
    """Return what is imported, each name of a `from` import by itself: it may be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_room_imports_only_what_it_may_know(package: str) -> None:
    offences = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in source_files(package)
        for module in imported_modules(path)
        if module.split(".")[0] in FORBIDDEN[package]
    ]
    assert offences == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_file_postpones_its_annotations(package: str) -> None:
    """Ray Serve would hand the builder a raw dict instead of its config model, silently."""
    offences = [str(path.relative_to(ROOT)) for path in source_files(package) if "__future__" in imported_modules(path)]
    assert offences == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_every_file_says_what_it_is(package: str) -> None:
    offences = [
        str(path.relative_to(ROOT))
        for path in source_files(package)
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert offences == []


def test_only_the_transport_knows_how_messages_travel() -> None:
    """Everything else imports names of the package `cluster.transport`, and none of its modules."""
    room, mirror = ROOT / "cluster" / "transport", ROOT / "tests" / "cluster"
    inside = {path.stem for path in room.glob("*.py")}
    offences = [
        f"{path.relative_to(ROOT)} imports {module}"
        for package in (*FORBIDDEN, "tests")
        for path in source_files(package)
        if not path.is_relative_to(room) and not path.is_relative_to(mirror)
        for module in imported_names(path)
        if module.startswith("cluster.transport.") and module.split(".")[2] in inside
    ]
    assert offences == []
