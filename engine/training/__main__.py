"""The command line: `python -m engine.training pretrain|distill|head|evaluate`."""

import argparse
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET
from engine.errors import PacelineError
from engine.training import comparison
from engine.training import evaluate as evaluation
from engine.training.checkpoint import TrainingError
from engine.training.distill import DistillOptions, distill
from engine.training.head_training import HeadOptions, train_head
from engine.training.loop import Plan
from engine.training.measured_acceptance import CONTINUATION_TOKENS
from engine.training.new_head import KINDS, HeadShape
from engine.training.pretrain import PretrainOptions, pretrain
from engine.training.small_model import Size


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.training", description="Train and measure draft models.")
    commands = parser.add_subparsers(dest="command", required=True)
    adders = {
        "pretrain": (_add_pretrain, "train a tokenizer and a small model on text files"),
        "distill": (_add_distill, "train a draft to be accepted by a target"),
        "head": (_add_head, "train a head that drafts from a target's layers"),
        "evaluate": (_add_evaluate, "measure a pair's acceptance, and the speed of everything that could draft"),
    }
    for name, (add, summary) in adders.items():
        formatter = argparse.ArgumentDefaultsHelpFormatter
        add(commands.add_parser(name, help=summary, description=f"{summary}.".capitalize(), formatter_class=formatter))
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    try:
        arguments.run(arguments, console)
    except KeyboardInterrupt:
        console.print("stopped; the same command continues after the last checkpoint")
        return 1
    except PacelineError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        return 1
    return 0


def _add_training(parser: argparse.ArgumentParser, steps: int, batch_tokens: int) -> None:
    parser.add_argument("files", nargs="+", type=Path, help="text files, .gz allowed, or folders of them")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint and the model")
    parser.add_argument("--steps", type=int, default=steps, help="may change when a run is resumed")
    parser.add_argument("--batch-tokens", type=int, default=batch_tokens, help="tokens per step")
    parser.add_argument("--checkpoint-minutes", type=float, default=3.0, help="time between two checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=shutil.which("g++") is not None,
        help="use torch.compile: takes a minute, then nearly twice as fast on a CPU",
    )


def _options(kind: type[Any], arguments: argparse.Namespace, **more: Any) -> Any:
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in vars(arguments).items() if name in names} | more)


def _add_pretrain(parser: argparse.ArgumentParser) -> None:
    _add_training(parser, steps=2000, batch_tokens=6144)
    parser.add_argument("--size", default="12x192", help="LAYERSxHIDDEN")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens of the tokenizer")
    parser.add_argument("--context", type=int, default=2048, help="longest context in tokens")
    parser.set_defaults(run=_run_pretrain)


def _run_pretrain(arguments: argparse.Namespace, console: Console) -> None:
    options = _options(PretrainOptions, arguments, size=Size.parse(arguments.size, arguments.context))
    plan = Plan(arguments.steps, 60 * arguments.checkpoint_minutes)
    pretrain(arguments.files, arguments.output, options, plan, console)


def _add_student(parser: argparse.ArgumentParser) -> None:
    _add_training(parser, steps=1500, batch_tokens=4096)
    parser.add_argument("--target", type=Path, required=True, help="the target's directory")
    parser.add_argument("--continuations", type=int, default=2048, help="training texts that the target generates")
    parser.add_argument("--lr-scale", type=float, default=1.0, help="scales the learning rates; below 1 to refine")
    parser.add_argument("--reports", type=int, default=3, help="how often acceptance is measured during training")


def _add_distill(parser: argparse.ArgumentParser) -> None:
    _add_student(parser)
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--draft", type=Path, help="the draft's directory to start from")
    start.add_argument("--draft-size", default="2x160", help="LAYERSxHIDDEN of a new draft")
    parser.set_defaults(run=_run_distill)


def _run_distill(arguments: argparse.Namespace, console: Console) -> None:
    options = _options(DistillOptions, arguments)
    plan = Plan(arguments.steps, 60 * arguments.checkpoint_minutes, arguments.reports)
    draft = arguments.draft or Size.parse(arguments.draft_size)
    distill(arguments.files, arguments.target, draft, arguments.output, options, plan, console)


def _add_head(parser: argparse.ArgumentParser) -> None:
    _add_student(parser)
    shape = HeadShape()
    parser.add_argument("--kind", choices=KINDS, default=shape.kind, help="the kind of head")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--head", type=Path, help="a head's directory to start from, whose sizes it keeps")
    start.add_argument("--draft", type=Path, help="a draft's directory to start from, whose layers a block head takes")
    parser.add_argument("--layers", type=int, default=shape.layers, help="layers of its own")
    parser.add_argument("--taps", type=int, nargs="+", default=[], help="the target's layers to read; 1 is the first")
    parser.add_argument("--draft-vocab", type=int, default=0, help="draft only the most frequent tokens; 0 is all")
    parser.add_argument(
        "--block-size", type=int, default=shape.block_size, help="places of a block; eagle3: passes of a training draft"
    )
    parser.add_argument("--markov-rank", type=int, default=shape.markov_rank, help="dspark: rank of its Markov part")
    parser.set_defaults(run=_run_head)


def _run_head(arguments: argparse.Namespace, console: Console) -> None:
    arguments.taps = tuple(arguments.taps)
    options = _options(HeadOptions, arguments, shape=_options(HeadShape, arguments))
    plan = Plan(arguments.steps, 60 * arguments.checkpoint_minutes, arguments.reports)
    starts = arguments.head, arguments.draft
    train_head(arguments.files, arguments.target, *starts, arguments.output, options, plan, console)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, default=BUNDLED_TARGET, help="the target's directory")
    parser.add_argument("--draft", type=Path, default=BUNDLED_DRAFT, help="the draft's directory")
    parser.add_argument("--prompts", type=Path, default=evaluation.BUNDLED_PROMPTS, help="text or JSON lines")
    parser.add_argument("--corpus", type=Path, nargs="+", default=[], help="measure the held-out loss on these files")
    parser.add_argument("--k", type=int, default=4, help="draft tokens per round in the acceptance table")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--head", type=Path, nargs="+", default=[], help="trained heads to compare with the draft")
    parser.add_argument("--compare", action="store_true", help="serve every method that can draft, and compare them")
    parser.add_argument("--self-layers", type=int, default=0, help="compare drafting=self with so many layers, too")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the comparison")
    parser.add_argument("--price", type=float, help="of an hour of the machine: the comparison shows cost per M tokens")
    parser.set_defaults(run=_run_evaluate)


def _run_evaluate(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.k < 1:
        raise TrainingError(f"--k is {arguments.k}; it must be at least 1")
    prompts, served = evaluation.read_prompts(arguments.prompts), None
    with console.status("measuring"):
        measured = evaluation.evaluate(arguments.target, arguments.draft, prompts, arguments.corpus, arguments.head)
        if arguments.compare or arguments.head or arguments.self_layers:
            tasks = evaluation.read_tasks(arguments.prompts)
            candidates = comparison.candidates(arguments.draft, arguments.head, arguments.self_layers)
            how = arguments.k, arguments.temperature, CONTINUATION_TOKENS
            served = [comparison.measure(arguments.target, settings, tasks, *how) for settings in candidates]
    evaluation.show(measured, arguments.k, Console())
    if served is not None:
        comparison.show(served, arguments.k, arguments.temperature, arguments.price, Console())
    if arguments.json:
        evaluation.write_json(measured, arguments.k, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
