"""/openapi.json tells the truth: schemathesis sends what it allows and what it does not, and checks every answer."""

import subprocess
import sys
from pathlib import Path

from deployments.config import AppConfig
from tests.deployments.serving import serving

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "unsupported_method",
]
"""Not positive_data_acceptance: what fits the schema may still exceed a limit or the model's context."""


def test_the_schema_holds_under_a_fuzzer(config: AppConfig, model_dir: Path) -> None:
    with serving(config, model_dir) as (url, rig):
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
            *("--checks", ",".join(CHECKS), "--mode", "all", "--phases", "coverage,fuzzing"),
            *("--max-examples", "6", "--seed", "1", "--max-failures", "20", "--request-timeout", "60"),
            *("--generation-database", "none", "--no-color"),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=model_dir, check=False)
        assert result.returncode == 0, result.stdout[-12000:] + result.stderr[-2000:]
        assert (rig.engine.num_running, rig.engine.num_waiting) == (0, 0)
        assert rig.engine.num_free_blocks == rig.engine.num_blocks
