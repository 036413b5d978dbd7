"""Compare two runs of the acceptance test on GPUs of one name; exit with 1 if the second is worse.

    python -m tests.gpu.compare tests/gpu/results/"NVIDIA H100 80GB HBM3".jsonl NEW/acceptance.jsonl [--tolerance 0.1]

Times may grow, and rates shrink, by the tolerance. A figure of exactness may not change at all.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("stage", "cell", "arm", "product", "start", "requests", "k")
"""The fields that say what was measured."""
_TIMES = ("_ms", "ms", "_us", "us", "_s", "s", "seconds")
_RATES = ("gb_per_s", "tokens_per_s", "tokens_per_round")
_EXACT = ("different", "alone", "beside_another_row", "in_a_prompt", "waits", "parted_at", "prepared_in_rounds")
_ERRORS = ("error",)
_SHORTEST_S = 1.0
"""Seconds below which a stage or a start is not compared: its noise is larger."""


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the readings of a file by what was measured."""
    readings = {}
    for line in path.read_text().splitlines():
        reading = json.loads(line)
        name = ", ".join(str(reading[field]) for field in _NAMES if field in reading)
        readings[f"{name}, end" if "exit" in reading else name] = reading
    return readings


def compare(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> Iterator[tuple[str, float | None, bool]]:
    """Yield each figure that two readings share: its name, new over old if it has a ratio, and whether it is worse."""
    for name, before in old.items():
        after = new.get(name)
        if name in _NAMES or isinstance(before, str):
            continue
        if name.split("_")[0] in _EXACT or name.endswith(_EXACT):
            yield name, None, before != after
            continue
        for was, now in zip(
            *(value if isinstance(value, list) else [value] for value in (before, after)), strict=False
        ):
            if not isinstance(was, int | float) or not isinstance(now, int | float) or not was:
                continue
            ratio = now / was
            if name in _RATES:
                yield name, ratio, ratio < 1 - tolerance
            elif name in _ERRORS:
                yield name, ratio, ratio > 2
            elif name in _TIMES or name.endswith(_TIMES):
                is_short = name.endswith(("_s", "seconds")) and was < _SHORTEST_S
                yield name, ratio, ratio > 1 + tolerance and not is_short


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.1, help="a tenth by default")
    arguments = parser.parse_args()
    old, new = read(arguments.old), read(arguments.new)
    is_worse = False
    for name, reading in old.items():
        if name not in new:
            is_worse = True
            print(f"WORSE  {name}: not measured any more")
            continue
        for figure, ratio, worse in compare(reading, new[name], arguments.tolerance):
            is_worse |= worse
            text = f"{reading[figure]} -> {new[name].get(figure)}" + (f" ({ratio:.2f})" if ratio is not None else "")
            print(f"{'WORSE' if worse else 'ok   '}  {name}: {figure} {text}")
    sys.exit(is_worse)


if __name__ == "__main__":
    main()
