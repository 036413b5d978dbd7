"""The Kubernetes Job runs the command as it is, and exits with its status."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.load.options import parse

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "k8s" / "load"


@pytest.fixture
def container() -> dict[str, Any]:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (path,) = kustomization["resources"]
    job = yaml.safe_load((FOLDER / path).read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == kustomization["images"][0]["name"]
    return container


def test_the_arguments_are_those_of_the_command(container, tmp_path):
    key = tmp_path / "keys"
    key.write_text("secret\n")
    arguments = [word.replace("/etc/paceline/api-keys/keys", str(key)) for word in container["args"]]
    options = parse(arguments)
    assert options.url == "http://paceline-serve-svc:8000"  # KubeRay's Service of the RayService `paceline`
    assert options.api_key == "secret"
    assert options.sweep


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_job_ends_with_the_commands_status_and_shows_the_figures(container, tmp_path, status):
    """The shell line itself, with a command that exits as told."""
    summary = tmp_path / "summary.json"
    summary.write_text('{"figures": 1}')
    fake = tmp_path / "paceline"
    fake.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    fake.chmod(0o755)
    command = [word.replace("/tmp/load/summary.json", str(summary)) for word in container["command"]]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(
        [*command, "--slo=ttft=1", "two words"], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == status
    assert ended.stdout == 'load --slo=ttft=1 two words\n{"figures": 1}'


def test_the_command_needs_only_what_the_product_needs(tmp_path):
    """The wheel has these files and the product's requirements, and no torch is loaded to send requests."""
    (tmp_path / "paceline_load").mkdir()
    for path in (ROOT / "tests/load").glob("*.py"):
        (tmp_path / "paceline_load" / path.name).write_bytes(path.read_bytes())
    code = """
import sys
import paceline_load.__main__
loaded = {name.partition(".")[0] for name in sys.modules}
heavy = {"torch", "ray", "engine", "transformers", "psutil"}
print(sorted(loaded & {"pytest", "aiohttp", "scipy", "openai", *heavy}))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "[]", ended.stderr
