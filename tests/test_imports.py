"""What a process imports before it does anything: torch only where there are tensors, or each start pays for it."""

import subprocess
import sys

import pytest

TOKENIZER = """
from engine.config import BUNDLED_TARGET, ModelConfig
from engine.models.tokenizer import load_tokenizer
load_tokenizer(ModelConfig(str(BUNDLED_TARGET)))
"""
SERVE_RUN = """
import deployments.cli
from deployments import app
from deployments.config import AppConfig
app(AppConfig())
"""


def imported(code: str, packages: set[str]) -> list[str]:
    """The packages that a fresh interpreter has imported after this code."""
    code += f"\nimport sys\nprint(*{packages} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return process.stdout.split()


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import engine", id="engine"),
        pytest.param("import deployments.ingress.proxy", id="proxy"),
        pytest.param(SERVE_RUN, id="serve run"),
        pytest.param("import cluster.workers.actors", id="worker before it loads"),
    ],
)
def test_what_loads_nothing_imports_no_library_of_models(code: str) -> None:
    assert imported(code, {"torch", "transformers"}) == []


@pytest.mark.parametrize("module", ["deployments.router.router", "deployments.ingress.ingress"])
def test_what_holds_no_tensors_imports_no_torch(module: str) -> None:
    assert imported(f"import {module}{TOKENIZER}", {"torch"}) == []


LIBRARY = """
import sys
sys.modules |= dict.fromkeys(["ray", "llguidance", "pydantic", "msgspec", "fastapi", "httpx", "prometheus_client"])
from engine import LLM, SamplingParams
llm = LLM(compile="off", num_blocks=64)
[result] = llm.generate(["This PEP proposes"], SamplingParams(max_tokens=4), show_progress=False)
assert len(result.outputs[0].token_ids) == 4
"""


def test_the_engine_runs_where_only_torch_and_transformers_are_installed() -> None:
    """As on a bare machine with a GPU; grammars need llguidance, which is imported where they are used."""
    assert imported(LIBRARY, {"cluster", "deployments"}) == []
