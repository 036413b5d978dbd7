"""Compiles models before they are served: `python -m engine.execution.cpu MODEL_DIRECTORY...`."""

import argparse
import sys

import torch

from engine.config import ModelConfig
from engine.errors import PacelineError
from engine.execution.cpu.backend import load_cpu
from engine.execution.registry import resolve_dtype


def main() -> None:
    """Compile models that are not in the cache yet."""
    parser = argparse.ArgumentParser(prog="python -m engine.execution.cpu", description=main.__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL_DIRECTORY")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--revision")
    options = parser.parse_args()
    for path in options.models:
        config = ModelConfig(path, dtype=options.dtype, device="cpu", revision=options.revision)
        try:
            load_cpu(config, resolve_dtype(config.dtype, torch.device("cpu")), None).compile()
        except (PacelineError, OSError) as error:
            sys.exit(f"{path}: {error}")


if __name__ == "__main__":
    main()
