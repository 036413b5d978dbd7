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

MIRRORED_ELSEWHERE = {
    "cluster/worker_set.py": "tests/e2e/test_group.py starts and kills real ones",
    "cluster/transport/endpoint.py": "tests/cluster/transport/test_channel.py connects to one",
    "deployments/builder.py": "tests/deployments/test_app.py serves what it builds",
    "deployments/grammar_check/checker.py": "tests/deployments/openai/test_structured_output.py",
    "deployments/grammar_check/process.py": "tests/deployments/openai/test_structured_output.py",
    "deployments/ingress/answer.py": "tests/deployments/ingress/test_routes.py",
    "deployments/ingress/ingress.py": "tests/deployments/ingress/test_routes.py",
    "deployments/ingress/router_client.py": "tests/deployments/test_app.py",
    "deployments/openai/bodies.py": "tests/deployments/ingress/test_routes.py",
    "deployments/openai/chat_writer.py": "tests/deployments/openai/test_tools.py",
    "deployments/openai/choices.py": "tests/deployments/ingress/test_routes.py",
    "deployments/openai/fields.py": "tests/deployments/openai/test_requests.py",
    "deployments/openai/parameters.py": "tests/deployments/openai/test_requests.py",
    "deployments/openai/responses.py": "tests/deployments/test_responses_api.py",
    "deployments/openai/responses_writer.py": "tests/deployments/test_responses_api.py",
    "deployments/openai/writer.py": "tests/deployments/ingress/test_routes.py",
    "deployments/router/router.py": "tests/deployments/test_app.py",
    "engine/config.py": "names and defaults only; tests/deployments/test_config.py compares them",
    "engine/drafting/chain.py": "tests/engine/drafting/test_model.py",
    "engine/drafting/run_ahead/branches.py": "tests/engine/drafting/run_ahead/test_verdicts.py",
    "engine/drafting/run_ahead/foresight.py": "tests/engine/drafting/run_ahead/test_verdicts.py",
    "engine/drafting/run_ahead/pace.py": "tests/engine/drafting/run_ahead/test_drafter.py",
    "engine/execution/cpu/kernels.py": "tests/engine/execution/cpu/test_paged_attention.py",
    "engine/execution/cpu/packages.py": "tests/engine/execution/cpu/test_compiled.py",
    "engine/execution/memory.py": "tests/engine/models/test_causal_lm.py",
    "engine/llm.py": "tests/engine/test_features.py",
    "engine/protocols.py": "data without behaviour, and protocols",
    "engine/training/errors.py": "one exception without behaviour",
    "engine/verification/verifier.py": "tests/engine/test_exactness.py",
}
"""Modules without a test file of their own, and what tests them instead."""


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


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


def mirror(module: Path) -> Path:
    """The test file of a module: `engine/x/y.py` has `tests/engine/x/test_y.py`."""
    return Path("tests", module.parent, f"test_{module.stem.strip('_')}.py")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_every_module_has_a_test_file_of_its_own_or_a_reason(package: str) -> None:
    modules = [path.relative_to(ROOT) for path in source_files(package) if path.name != "__init__.py"]
    lacking = {str(module) for module in modules if not (ROOT / mirror(module)).is_file()}
    listed = {module for module in MIRRORED_ELSEWHERE if module.startswith(f"{package}/")}
    assert lacking - listed == set()
    assert listed - lacking == set(), "these have a test file, or are gone: take them from the list"
