"""The acceptance test of a GPU: which paths run, which texts differ, what a pass costs, in a quarter of an hour.

    python -m tests.gpu.acceptance [--device cpu] [--stages texts,flips] [--out FOLDER]

Each stage is a process of its own with a time limit, and prints one JSON line per reading; a stage that fails says why
and the next one starts. `--device cpu` is a dry run with tiny models, in one process. It needs torch, transformers and
safetensors, for `served` msgspec and cryptography, and neither Ray nor a network.
"""

import argparse
import itertools
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.gpu.kernels import kernels, noise_bits
from tests.gpu.memory import default_pair
from tests.gpu.passes import bandwidth, chains, passes
from tests.gpu.texts import equal_texts, flips

Reading = dict[str, Any]
_DRY_CELLS = ((1, 1, 64), (2, 5, 64))

STAGES: dict[str, tuple[int, Callable[[str, bool], Iterator[Reading]]]] = {
    "machine": (60, lambda device, dry: iter([machine(device, dry=dry)])),
    "noise": (60, lambda device, dry: iter([noise_bits(device, num_rows=64 if dry else 768)])),
    "kernels": (120, lambda device, dry: kernels(device, dry=dry)),
    "texts": (240, lambda device, dry: equal_texts(device, num_tokens=2 if dry else 64)),
    "flips": (120, lambda device, dry: flips(device, num_tokens=2 if dry else 96)),
    "target": (90, lambda device, dry: passes(device, "tiny", cells=_DRY_CELLS) if dry else passes(device, "8b")),
    "draft": (90, lambda device, dry: passes(device, "tiny", cells=_DRY_CELLS) if dry else passes(device, "1b")),
    "chain": (
        120,
        lambda device, dry: chains(device, "tiny", context=64, ks=(2,)) if dry else chains(device, "1b"),
    ),
    "served": (300, lambda device, dry: served_rounds(device, dry=dry)),
    "memory": (
        150,
        lambda device, dry: default_pair(
            device, ("tiny", "tiny") if dry else ("8b", "1b"), num_tokens=8 if dry else 64
        ),
    ),
}
"""Time limit in seconds and readings of each stage, by name; readings take the device and whether it is a dry run."""


def machine(device: str, *, dry: bool) -> Reading:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
    return {"device": name, **versions, **bandwidth(device, num_bytes=1 << 20 if dry else 1 << 30)}


def served_rounds(device: str, *, dry: bool) -> Iterator[Reading]:
    try:
        from tests.gpu.served import served
    except ImportError as error:
        return iter([{"skipped": f"{error}; `make gpu-wheels` collects what it needs"}])
    if dry:
        return served(device, ("tiny", "tiny"), num_rounds=20, prompt_length=20)
    return served(device, ("8b", "1b"), num_rounds=200, prompt_length=512)


def run_stage(name: str, device: str, *, dry: bool) -> list[str]:
    lines, (_, readings) = [], STAGES[name]
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    for reading in readings(device, dry):
        lines.append(json.dumps({"stage": name, **reading}))
        print(lines[-1], flush=True)
    return lines


def start_stage(name: str, device: str) -> list[str]:
    """Run one stage in a process of its own, a dry run in this one; print its lines, and return them.

    A stage that fails or takes longer than its limit ends with a line that says so.
    """
    if device == "cpu":
        return run_stage(name, device, dry=True)
    limit, _ = STAGES[name]
    command = [sys.executable, "-m", "tests.gpu.acceptance", "--device", device, "--only", name]
    started = time.monotonic()
    result = subprocess.run(["timeout", str(limit), *command], capture_output=True, text=True)
    lines = result.stdout.splitlines()
    end: Reading = {"stage": name, "seconds": round(time.monotonic() - started, 1), "exit": result.returncode}
    end["log"] = [line for line in result.stderr.splitlines() if line.startswith("engine.")][-12:]
    if result.returncode:
        end["error"] = result.stderr[-3000:]
    lines.append(json.dumps(end))
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--stages", default=",".join(STAGES), help="names, separated by commas; all by default")
    parser.add_argument("--out", type=Path, help="a folder for acceptance.jsonl")
    parser.add_argument("--only", choices=STAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        run_stage(arguments.only, arguments.device, dry=arguments.device == "cpu")
        return
    lines = itertools.chain.from_iterable(start_stage(name, arguments.device) for name in arguments.stages.split(","))
    text = "\n".join(lines) + "\n"
    if arguments.out:
        (arguments.out / "acceptance.jsonl").write_text(text)
    sys.exit(any(json.loads(line).get("exit") for line in text.splitlines()))


if __name__ == "__main__":
    main()
