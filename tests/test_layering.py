"""Imports go one way, deployments -> cluster -> engine, and no package imports what it must not know."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from engine.drafting.registry import METHODS
from engine.verification.rule import RULES

ROOT = Path(__file__).parents[1]

FORBIDDEN = {
    "engine": {"cluster", "deployments", "tests", "ray", "fastapi", "starlette", "httpx", "ssl"}
    | {"prometheus_client", "uvicorn", "cryptography", "socket"},
    "cluster": {"deployments", "tests", "fastapi", "starlette", "httpx", "prometheus_client", "uvicorn"},
    "deployments": {"tests", "ssl", "cryptography"},
}

MIRRORED_ELSEWHERE = {
    "engine/drafting/assembly.py": "tests/engine/test_llm.py and tests/cluster/test_heads.py load with it",
    "cluster/transport/credentials.py": "tests/cluster/transport/test_link.py and test_inbox.py",
    "cluster/workers/proposals.py": "tests/cluster/workers/test_draft_queue.py",
    "deployments/__main__.py": "tests/e2e/served/test_stopping.py, whose server it starts",
    "deployments/cli/settings.py": "tests/test_readme.py",
    "deployments/ingress/draining.py": "tests/e2e/replicated/test_stopping.py",
    "deployments/openai/sampling_fields.py": "tests/deployments/openai/test_refusals.py and test_accepted_fields.py",
    "deployments/openai/types.py": "the same",
    "deployments/sections.py": "tests/deployments/test_config.py",
    "deployments/prompts/grammar_process.py": "tests/deployments/prompts/test_grammar_compiler.py",
    "engine/blocks/row_extras.py": "tests/engine/hybrids/test_state_slots.py and encoder_decoder/test_input_rows.py",
    "engine/drafting/learning/whole_text.py": "tests/engine/drafting/learning/test_learner.py",
    "engine/drafting/model/block_drawer.py": "tests/engine/drafting/in_target/test_block_drafter.py",
    "engine/drafting/model/block_model_drafter.py": "tests/engine/drafting/model/test_feature_cache.py",
    "engine/drafting/model/draft_model.py": "a dataclass without behaviour",
    "engine/drafting/model/token_drawer.py": "tests/engine/test_exactness.py, which checks every draft token",
    "engine/drafting/run_ahead/chains.py": "tests/engine/drafting/run_ahead/test_run_ahead.py",
    "engine/drafting/trees/levelwise.py": "tests/engine/drafting/trees/test_tree_drafter.py and test_sampled_tree.py",
    "engine/drafting/trees/run_ahead_trees.py": "tests/engine/drafting/run_ahead/test_run_ahead.py",
    "engine/encoder_decoder/inputs.py": "tests/engine/encoder_decoder/test_t5.py",
    "engine/execution/backend.py": "a protocol",
    "engine/execution/forward_row.py": "tests/engine/execution/test_batch.py",
    "engine/heads/head.py": "tests/engine/heads/test_eagle3.py and the other kinds' files",
    "engine/heads/registry.py": "the same",
    "engine/heads/unrolling.py": "tests/engine/training/test_head_training.py",
    "engine/execution/vllm/rank.py": "tests/engine/test_matrix.py and tests/e2e/groups, over vLLM",
    "engine/execution/vllm/runner.py": "the same",
    "engine/execution/vllm/vllm_verifier.py": "the same",
    "engine/verification/decider.py": "tests/engine/verification/test_verifier.py",
    "engine/hybrids/state_tensors.py": "tests/engine/hybrids/test_row_states.py and tests/engine/test_matrix.py",
    "engine/models/layers/layer_attention.py": "tests/engine/execution/test_attention.py",
    "engine/models/layers/layer_state.py": "tests/engine/models/layers/test_recurrences.py, and footprint and hybrids",
    "engine/requests/output.py": "dataclasses without behaviour",
    "engine/models/shared_tokens.py": "tests/engine/drafting/model/test_translated.py",
    "engine/rounds.py": "tests/engine/test_two_rounds.py",
    "engine/stats/drafts.py": "tests/engine/test_scheduler.py and every test of accepted tokens",
    "engine/stats/preparation.py": "tests/engine/drafting/run_ahead/test_passes.py",
}
"""Modules without a test file of their own, and what tests them instead."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported_names(path: Path) -> list[str]:
    """Return all imported names; those of a `from` import one by one, because each may be a module."""
    names = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(package: str) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports, also in functions and for type checking.

    A name imported from a folder is the file of that name, where there is one, and not the folder.
    """
    modules = {module_name(path): path for path in source_files(package)}
    graph = {}
    for module, path in modules.items():
        imported = {name if name in modules else name.rpartition(".")[0] for name in imported_names(path)}
        graph[module] = imported & (modules.keys() - {module})
    return graph


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(package: str) -> list[tuple[Path, str]]:
    return [(path, module) for path in source_files(package) for module in imported_names(path)]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_it_may_know(package: str) -> None:
    assert [(path, module) for path, module in imports(package) if module.split(".")[0] in FORBIDDEN[package]] == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_file_postpones_its_annotations(package: str) -> None:
    """Ray Serve would hand the builder a raw dict instead of its config model, silently."""
    assert [path for path in source_files(package) if "__future__.annotations" in imported_names(path)] == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_every_package_docstring_names_all_its_modules(package: str) -> None:
    """The docstring of `__init__.py` is the reading order: `name` for a file, `name/` for a folder."""
    offences = []
    for init in (ROOT / package).rglob("__init__.py"):
        docstring = ast.get_docstring(tree_of(init)) or ""
        modules = {f"`{path.stem}`" for path in init.parent.glob("*.py") if not path.stem.startswith("__")}
        folders = {f"`{path.parent.name}/`" for path in init.parent.glob("*/__init__.py")}
        commands = {f"python -m {module_name(init)}" for _ in init.parent.glob("__main__.py")}
        lacking = {name for name in modules | folders | commands if name not in docstring}
        offences += [f"{init.relative_to(ROOT)} does not name {name}" for name in sorted(lacking)]
    assert offences == []


REGISTRIES = {ROOT / "engine/drafting/registry.py": METHODS, ROOT / "engine/verification/rule.py": RULES}
COMPARING = {*REGISTRIES, ROOT / "engine/drafting/settle.py"}
SETTINGS = {"drafting", "verification"}


def text_constants(node: ast.AST) -> set[str]:
    """The texts in an expression, those of subscripts left out: they name fields."""
    if isinstance(node, ast.Subscript):
        return text_constants(node.value)
    text = {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
    return text.union(*(text_constants(child) for child in ast.iter_child_nodes(node)))


def compared_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names of methods and rules that a file compares something with, and any text compared with their settings.

    "none" is a word of several settings, so it counts as a name only where it is compared with one of those two.
    """
    names = {name for registry in REGISTRIES.values() for name in registry} - {"none"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides: list[ast.AST] = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            sides = [node.subject, *(case.pattern for case in node.cases)]
        else:
            continue
        texts = {text for side in sides for text in text_constants(side)}
        words = {
            inner.attr if isinstance(inner, ast.Attribute) else inner.id
            for side in sides
            for inner in ast.walk(side)
            if isinstance(inner, ast.Attribute | ast.Name)
        }
        yield from ((node.lineno, text) for text in sorted(texts if words & SETTINGS else texts & names))


@pytest.mark.parametrize("package", FORBIDDEN)
def test_only_a_registry_and_what_settles_them_compare_the_names_of_methods_and_rules(package: str) -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{line} compares with {name!r}"
        for path in source_files(package)
        if path not in COMPARING
        for line, name in compared_names(tree_of(path))
    ]
    assert offences == []


def test_only_the_transport_package_imports_its_modules() -> None:
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


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_modules_import_one_another_in_a_cycle(package: str) -> None:
    TopologicalSorter(import_graph(package)).prepare()  # raises CycleError, which names the cycle


def room(module: str, modules: set[str]) -> str:
    """The node of a module among the folders: its folder, or itself if it is of a trunk, or a registry.

    The trunk of a package are the files beside its folders. A registry names what lies beside and below it, so it
    stands above its folder.
    """
    folder, _, name = module.rpartition(".")
    is_folder = any(other.startswith(f"{module}.") for other in modules)
    if is_folder or name == "registry" or folder in FORBIDDEN:
        return module
    return folder


def folder_graph(package: str) -> dict[str, set[str]]:
    """The folders, trunk files and registries that each of them imports."""
    modules = import_graph(package)
    graph: dict[str, set[str]] = {}
    for module, imported in modules.items():
        node = room(module, set(modules))
        graph.setdefault(node, set()).update(room(other, set(modules)) for other in imported)
        graph[node].discard(node)
    return graph


VOCABULARY = {"protocols", "wire", "params", "config", "sections", "errors", "ray_internals", "ray_core"}
"""The trunk's files that folders may import: what its parts exchange, sampling parameters, settings, exceptions, and
Ray's private parts."""
CODE = (".py", ".cpp")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_folders_import_one_another_in_a_cycle(package: str) -> None:
    TopologicalSorter(folder_graph(package)).prepare()


@pytest.mark.parametrize("package", FORBIDDEN)
def test_folders_import_only_the_vocabulary_of_the_trunk(package: str) -> None:
    trunk = {f"{package}.{path.stem}" for path in (ROOT / package).glob("*.py")} - {
        f"{package}.{x}" for x in VOCABULARY
    }
    offences = {
        f"{module} imports {other}"
        for module, imported in import_graph(package).items()
        for other in imported & trunk
        # These start the trunk.
        if module.count(".") > 1 and not module.startswith(("deployments.cli.", "engine.training.comparison"))
    }
    assert offences == set()


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_folder_holds_at_most_twelve_files(package: str) -> None:
    folders = [path.parent for path in (ROOT / package).rglob("__init__.py")]
    sizes = {folder: len([path for path in folder.iterdir() if path.suffix in CODE]) - 1 for folder in folders}
    assert {str(folder.relative_to(ROOT)): size for folder, size in sizes.items() if size > 12} == {}


def test_no_two_files_have_the_same_name() -> None:
    names = Counter(path.stem for package in FORBIDDEN for path in source_files(package))
    shared = {name for name, count in names.items() if count > 1}
    assert shared - {"__init__", "__main__", "registry", "config", "errors", "commands"} == set()


ROOMS = ("engine.hybrids", "engine.encoder_decoder", "engine.drafting.trees")
"""Refinements, which only tables and registries name; those import them when a model or a method needs them."""


def test_nothing_but_a_registry_imports_a_refinement() -> None:
    offences = {
        f"{module} imports {other}"
        for package in FORBIDDEN
        for module, imported in import_graph(package).items()
        for other in imported
        if other.startswith(ROOMS) and not module.startswith(ROOMS) and not module.endswith(".registry")
    }
    assert offences == set()


HARDWARE = ("engine.execution.cpu", "engine.execution.cuda")
BACKEND_REGISTRY = ROOT / "engine" / "execution" / "registry.py"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_only_the_backend_registry_imports_hardware_packages(package: str) -> None:
    assert [
        (path, module)
        for path, module in imports(package)
        for hardware in HARDWARE
        if module.startswith(hardware) and not module_name(path).startswith(hardware) and path != BACKEND_REGISTRY
    ] == []
