"""The wheel holds what the commands need, and the workflows call what there is."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.test_layering import ROOT

PACKAGES = ("engine", "cluster", "deployments")
DATA = ("*.md", "*.py", "*.typed", "*.cpp", "*.h", "*.html", "*.js", "*.json", "*.css", "*.svg")
"""Files of the packages that are read when they run; the bundled pair's are all files of its folder."""
OWN_TESTS = {"ci.py"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*PACKAGES, "tests/load"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = f"from hatchling.build import build_wheel; build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    (path,) = folder.glob("paceline-*.whl")
    return path


def test_the_wheel_holds_all_that_runs_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        commands = archive.read(entry_points).decode()
    files = {path for package in PACKAGES for pattern in DATA for path in (ROOT / package).rglob(pattern)}
    files |= {path for path in (ROOT / "engine" / "pair").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    expected = {str(path.relative_to(ROOT)) for path in files}
    load = {path.name for path in (ROOT / "tests" / "load").glob("*.py") if not path.name.startswith("test_")}
    assert names == expected | {f"paceline_load/{name}" for name in load - OWN_TESTS}
    assert "paceline = deployments.cli.commands:main" in commands


@pytest.mark.long
def test_an_empty_environment_gets_the_commands(wheel: Path, tmp_path: Path) -> None:
    """From the registry that pip has here, with the versions of the constraints."""
    venv.create(tmp_path / "empty", with_pip=True)
    programs = tmp_path / "empty" / "bin"
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, wheel], check=True)
    for words, told in {
        "version": "paceline ",
        "serve --help": "name=value",
        "load --help": "python -m paceline_load",
        "evaluate --help": "Measure a pair's acceptance",
    }.items():
        command = [programs / "paceline", *words.split()]
        shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert told in shown


def test_the_workflows_call_what_there_is() -> None:
    checks, image = (yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text()) for name in ("ci", "image"))
    (steps,) = [job["steps"] for job in checks["jobs"].values()]
    assert ".ci/run" in [step.get("run") for step in steps]
    (build,) = image["jobs"].values()
    (options,) = [step["with"] for step in build["steps"] if "build-push-action" in step.get("uses", "")]
    assert (ROOT / options["file"]).is_file()
    stages = [
        line.split()[-1] for line in (ROOT / options["file"]).read_text().splitlines() if line.startswith("FROM ")
    ]
    assert {*build["strategy"]["matrix"]["target"]} <= {*stages}
    assert options["sbom"] is True
