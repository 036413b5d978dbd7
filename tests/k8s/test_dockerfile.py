"""The image: what it sets, what hadolint says, and its RUN steps replayed in an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray

from deployments.local.environment import SERVE_ENVIRONMENT
from engine.execution.cpu.compilation.packages import CACHE_VARIABLE
from tests.k8s.dockerfile import instructions, stage, variables
from tests.k8s.manifests import K8S, ROOT

DOCKERFILE = K8S / "Dockerfile"
TARGETS = ("cpu", "cuda", "cuda-vllm")


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    checked = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_the_image_starts_ray_as_serve_needs_it(target: str) -> None:
    assert variables(stage(DOCKERFILE, target)).items() >= SERVE_ENVIRONMENT.items()


@pytest.mark.parametrize("target", TARGETS)
def test_the_image_runs_as_a_user_who_writes_to_tmp_only(target: str) -> None:
    steps = stage(DOCKERFILE, target)
    assert [value for name, value in steps if name == "USER"] == ["1000"]
    assert steps[-1] == ("USER", "1000")
    settings = variables(steps)
    assert settings["HOME"] == "/tmp"
    assert settings[CACHE_VARIABLE].startswith("/tmp/")


@pytest.mark.parametrize("target", TARGETS)
def test_docker_asks_the_process_itself_whether_it_lives(target: str) -> None:
    (check,) = (value for name, value in stage(DOCKERFILE, target) if name == "HEALTHCHECK")
    assert '"http://127.0.0.1:8000/live"' in check


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = {word for name, value in instructions(DOCKERFILE) if name == "COPY" for word in value.split()[:-1]}
    copied = {word for word in copied if not word.startswith("--")} - {"."}
    assert copied <= sent
    assert all((ROOT / name).exists() for name in sent)


@pytest.mark.slow
@pytest.mark.long
def test_its_steps_install_a_server_into_an_empty_folder() -> None:
    """Only apt-get is left out, and torch comes from the index that pip has here."""
    with tempfile.TemporaryDirectory() as name:  # not pytest's, which would keep gigabytes
        folder = Path(name)
        python, context = folder / "python", folder / "context"
        shutil.copytree(ROOT, context, ignore=not_sent)
        subprocess.run([sys.executable, "-m", "venv", python], check=True)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PATH"] = f"{python / 'bin'}:{environment['PATH']}"
        folders = {"/wheels": str(folder / "wheels"), "/source": str(context), "/opt/paceline": str(context)}
        for target in ("wheel", "cpu"):
            for instruction, command in stage(DOCKERFILE, target):
                if instruction == "RUN" and "apt-get" not in command:
                    command = re.sub(r"--mount=\S+|--index-url \S+", "", command)
                    for there, here in folders.items():
                        command = command.replace(there, here)
                    subprocess.run(["bash", "-ec", command], cwd=context, env=environment, check=True)
        check = ["python", "-c", "import deployments.builder, ray; print(ray.__version__)"]
        ran = subprocess.run(check, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == ray.__version__
        subprocess.run(["python", context / "k8s" / "drain.py", "--help"], cwd=folder, env=environment, check=True)


def not_sent(folder: str, names: list[str]) -> set[str]:
    """Return what the build does not see of a folder."""
    if Path(folder) != ROOT:
        return {"__pycache__"} & set(names)
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return set(names) - {line[1:].split("/")[0] for line in lines if line.startswith("!")}
