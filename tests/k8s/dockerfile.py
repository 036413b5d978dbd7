"""Reads a Dockerfile: its instructions, and those that make up one target."""

import json
import re
import shlex
from pathlib import Path

Instruction = tuple[str, str]


def instructions(path: Path) -> list[Instruction]:
    """Return the instructions of a Dockerfile as name and rest, with continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def stage(path: Path, target: str) -> list[Instruction]:
    """Return the instructions of a target, those of the stages that it starts from first."""
    stages: dict[str, list[Instruction]] = {}
    steps: list[Instruction] = []
    for name, rest in instructions(path):
        if name == "FROM":
            parent, _, alias = rest.partition(" AS ")
            stages[alias] = steps = list(stages.get(parent, []))
        else:
            steps.append((name, rest))
    return stages[target]


def variables(steps: list[Instruction]) -> dict[str, str]:
    words = [word for name, rest in steps if name == "ENV" for word in shlex.split(rest)]
    return dict(word.split("=", 1) for word in words)


def command(steps: list[Instruction]) -> list[str]:
    (last,) = [rest for name, rest in steps if name == "CMD"][-1:]
    words: list[str] = json.loads(last)
    return words
