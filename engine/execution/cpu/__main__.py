"""Compiles models before they are served: `python -m engine.execution.cpu MODEL_DIRECTORY...`."""

import argparse
import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, get_args

from engine.config import ModelConfig, Quantization
from engine.errors import PacelineError
from engine.execution.cpu.cpu_backend import CpuBackend
from engine.heads.head import head_model
from engine.heads.registry import load_target
from engine.models.first_layers import first_layers
from engine.models.registry import open_model

if TYPE_CHECKING:
    from engine.execution.backend import Part


def main() -> None:
    """Compile models that are not in the cache yet."""
    parser = argparse.ArgumentParser(prog="python -m engine.execution.cpu", description=main.__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL_DIRECTORY")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--quantization", default="none", choices=get_args(Quantization))
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument("--self-draft-layers", type=int, help="also compile the self-draft of the first layers")
    parser.add_argument("--head", help="a trained head, and also compile it")
    parser.add_argument("--until-input-ends", action="store_true", help="stop compiling when standard input ends")
    options = parser.parse_args()
    if options.until_input_ends:
        threading.Thread(target=_end_with_input, name="waiting for the input's end", daemon=True).start()
    for path in options.models:
        settings = {"dtype": options.dtype, "quantization": options.quantization, "device": "cpu"}
        config = ModelConfig(path, options.revision, head=options.head, **settings)
        try:
            source = open_model(config)
            backend = CpuBackend(load_target(source), source)
            backend.compile()
            parts: list[Part] = [head_model] if options.head else []
            if options.self_draft_layers:
                parts.append(partial(first_layers, count=options.self_draft_layers))
            for part in parts:
                backend.beside(part, backend.allocate_kv(2, 16))[0].compile()
        except (PacelineError, OSError) as error:
            sys.exit(f"{path}: {error}")


def _end_with_input() -> None:
    """Wait until standard input ends, then kill this process and the compilers that it has started."""
    while os.read(0, 1):  # not sys.stdin, whose lock the interpreter needs to end
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
