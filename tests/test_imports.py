"""What a process imports before it does anything: torch only where there are tensors, or each start pays for it."""

import subprocess
import sys

import pytest

CHECK = """
import sys
{}
heavy = {{"torch", "transformers.modeling_utils", "transformers.models.auto"}} & set(sys.modules)
print(*sorted(heavy))
"""
TOKENIZER = """
from engine.config import BUNDLED_TARGET, ModelConfig
from engine.vocabulary import load_tokenizer
load_tokenizer(ModelConfig(str(BUNDLED_TARGET)))
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import engine", id="engine"),
        pytest.param("import deployments.proxy", id="proxy"),
        pytest.param(
            "from deployments import app; from deployments.config import AppConfig; app(AppConfig())", id="run"
        ),
        pytest.param("import deployments.router" + TOKENIZER, id="Router"),
        pytest.param("import deployments.ingress" + TOKENIZER, id="Ingress"),
        pytest.param("import cluster.workers", id="worker before it loads"),
    ],
)
def test_what_holds_no_tensors_imports_no_torch(code: str) -> None:
    process = subprocess.run([sys.executable, "-c", CHECK.format(code)], capture_output=True, text=True, check=True)
    assert process.stdout.split() == []
