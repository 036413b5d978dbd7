"""Compiles models before they are served: `python -m engine.execution.cpu MODEL_DIRECTORY...`."""

import argparse
import os
import shutil
import signal
import sys
import threading
import time

import torch

from engine.config import ModelConfig
from engine.errors import PacelineError
from engine.execution.cpu.backend import load_cpu
from engine.execution.registry import resolve_dtype
from engine.scratch import scratch_folder

_END_S = 5.0
"""How long this process may take to remove its files."""


def main() -> None:
    """Compile models that are not in the cache yet."""
    parser = argparse.ArgumentParser(prog="python -m engine.execution.cpu", description=main.__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL_DIRECTORY")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument(
        "--skip",
        nargs="+",
        default=[],
        metavar="SUB_LAYER",
        help="also compile the self-draft that skips these, such as attention.3",
    )
    parser.add_argument("--until-input-ends", action="store_true", help="stop compiling when standard input ends")
    options = parser.parse_args()
    if not options.until_input_ends:
        _compile(options)
        return
    # In a folder, because a C++ compiler that is killed leaves its files behind.
    with scratch_folder() as folder:
        os.environ["TMPDIR"] = folder
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was ended"))  # which removes the folder
        watch = threading.Thread(target=_end_with_input, args=[folder], name="waiting for the input's end", daemon=True)
        watch.start()
        _compile(options)


def _compile(options: argparse.Namespace) -> None:
    for path in options.models:
        config = ModelConfig(
            path, options.revision, quantization=options.quantization, dtype=options.dtype, device="cpu"
        )
        try:
            backend = load_cpu(config, resolve_dtype(config.dtype, torch.device("cpu")), None)
            backend.compile()
            if options.skip:
                thinned, _ = backend.thin(options.skip, backend.allocate_kv(2, 16))
                thinned.compile()
        except (PacelineError, OSError) as error:
            sys.exit(f"{path}: {error}")


def _end_with_input(folder: str) -> None:
    """Wait until standard input ends, then end this process and the compilers that it has started."""
    while os.read(0, 1):  # not sys.stdin, whose lock an interpreter that ends must have
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(_END_S)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
