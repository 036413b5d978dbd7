"""Compiles the models of a workload before anything is measured."""

import subprocess
import sys

from rich.console import Console

from engine.execution.registry import resolve_device
from tests.bench.workload import Workload


def compile_models(workload: Workload, console: Console) -> None:
    """Compile both models' passes, where they run compiled and that was not done before."""
    if workload.compile == "auto" and resolve_device(workload.device).type == "cpu":
        with console.status("compiling, where that was not done before"):
            command = [sys.executable, "-m", "engine.execution.cpu", workload.target, workload.draft]
            subprocess.run([*command, "--dtype", workload.dtype], check=True, capture_output=True)
