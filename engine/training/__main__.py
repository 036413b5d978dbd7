"""The command line: `python -m engine.training pretrain|distill|evaluate|choose-layers`."""

import argparse
import shutil
import sys
from pathlib import Path

from rich.console import Console

from engine.errors import PacelineError
from engine.training import evaluate as evaluation
from engine.training.choose_layers import SearchOptions, choose_layers
from engine.training.distill import DistillOptions, distill
from engine.training.errors import TrainingError
from engine.training.loop import Plan
from engine.training.models import Size
from engine.training.pretrain import PretrainOptions, pretrain


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.training", description="Train and measure draft models.")
    commands = parser.add_subparsers(dest="command", required=True)
    adders = {
        "pretrain": (_add_pretrain, "train a tokenizer and a small model on text files"),
        "distill": (_add_distill, "train a draft to be accepted by a target"),
        "evaluate": (_add_evaluate, "measure a pair's acceptance and step times, and predict its speed-up"),
        "choose-layers": (_add_choose_layers, "search the sub-layers that a target skips when it drafts for itself"),
    }
    for name, (add, summary) in adders.items():
        formatter = argparse.ArgumentDefaultsHelpFormatter
        add(commands.add_parser(name, help=summary, description=f"{summary}.".capitalize(), formatter_class=formatter))
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    try:
        return int(arguments.run(arguments, console))
    except PacelineError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        return 1


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


def _add_pretrain(parser: argparse.ArgumentParser) -> None:
    _add_training(parser, steps=2000, batch_tokens=6144)
    parser.add_argument("--size", default="12x192", help="LAYERSxHIDDEN")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens of the tokenizer")
    parser.add_argument("--context", type=int, default=2048, help="longest context in tokens")
    parser.set_defaults(run=_run_pretrain)


def _run_pretrain(arguments: argparse.Namespace, console: Console) -> bool:
    options = PretrainOptions(
        size=Size.parse(arguments.size, arguments.context),
        vocab_size=arguments.vocab_size,
        batch_tokens=arguments.batch_tokens,
        seed=arguments.seed,
        compile=arguments.compile,
    )
    plan = Plan(arguments.steps, 60 * arguments.checkpoint_minutes)
    return not pretrain(arguments.files, arguments.output, options, plan, console)


def _add_distill(parser: argparse.ArgumentParser) -> None:
    _add_training(parser, steps=1500, batch_tokens=4096)
    parser.add_argument("--target", type=Path, required=True, help="the target's directory")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--draft", type=Path, help="the draft's directory to start from")
    start.add_argument("--draft-size", default="2x160", help="LAYERSxHIDDEN of a new draft")
    parser.add_argument("--continuations", type=int, default=2048, help="training texts that the target generates")
    parser.add_argument("--lr-scale", type=float, default=1.0, help="scales the learning rates; below 1 to refine")
    parser.add_argument("--reports", type=int, default=3, help="how often acceptance is measured during training")
    parser.set_defaults(run=_run_distill)


def _run_distill(arguments: argparse.Namespace, console: Console) -> bool:
    options = DistillOptions(
        batch_tokens=arguments.batch_tokens,
        continuations=arguments.continuations,
        seed=arguments.seed,
        lr_scale=arguments.lr_scale,
        compile=arguments.compile,
    )
    plan = Plan(arguments.steps, 60 * arguments.checkpoint_minutes, arguments.reports)
    draft = arguments.draft or Size.parse(arguments.draft_size)
    return not distill(arguments.files, arguments.target, draft, arguments.output, options, plan, console)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, default=evaluation.BUNDLED_TARGET, help="the target's directory")
    parser.add_argument("--draft", type=Path, default=evaluation.BUNDLED_DRAFT, help="the draft's directory")
    parser.add_argument("--prompts", type=Path, default=evaluation.BUNDLED_PROMPTS, help="text or JSON lines")
    parser.add_argument("--corpus", type=Path, nargs="+", default=[], help="measure the held-out loss on these files")
    parser.add_argument("--k", type=int, default=4, help="draft tokens per round in the acceptance table")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--png", type=Path, default=Path("speedup.png"), help="draw predicted speed-up against k")
    parser.set_defaults(run=_run_evaluate)


def _run_evaluate(arguments: argparse.Namespace, console: Console) -> bool:
    if arguments.k < 1:
        raise TrainingError(f"--k is {arguments.k}; it must be at least 1")
    prompts = evaluation.read_prompts(arguments.prompts)
    with console.status("measuring"):
        measured = evaluation.evaluate(arguments.target, arguments.draft, prompts, arguments.corpus)
    evaluation.show(measured, arguments.k, Console())
    evaluation.draw_chart(measured, arguments.png)
    if arguments.json:
        evaluation.write_json(measured, arguments.k, arguments.json)
    return False


def _add_choose_layers(parser: argparse.ArgumentParser) -> None:
    defaults = SearchOptions()
    parser.add_argument("--target", type=Path, default=evaluation.BUNDLED_TARGET, help="the target's directory")
    parser.add_argument("--prompts", type=Path, default=evaluation.BUNDLED_PROMPTS, help="text or JSON lines")
    parser.add_argument("--output", type=Path, required=True, help="JSON file; trials are kept beside it")
    parser.add_argument("--trials", type=_at_least_one, default=defaults.num_trials, help="sets to try")
    parser.add_argument("--k", type=_at_least_one, default=defaults.max_draft_tokens, help="longest draft")
    parser.add_argument("--tokens", type=_at_least_one, default=defaults.num_tokens, help="new tokens per prompt")
    parser.add_argument("--temperature", type=float, default=defaults.temperature, help="of the continuations")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the search and the continuations")
    parser.set_defaults(run=_run_choose_layers)


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _run_choose_layers(arguments: argparse.Namespace, console: Console) -> bool:
    options = SearchOptions(
        num_trials=arguments.trials,
        max_draft_tokens=arguments.k,
        num_tokens=arguments.tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    prompts = evaluation.read_prompts(arguments.prompts)
    choice = choose_layers(arguments.target, prompts, arguments.output, options, console)
    speedup, k = choice.gain.speedup, choice.gain.num_speculative_tokens
    text = f"drafting=self self_draft_skip=@{arguments.output} num_speculative_tokens={k}"
    Console(soft_wrap=True).print(f"{text}  # expected speed-up {speedup:.2f}", highlight=False)
    return False


if __name__ == "__main__":
    sys.exit(main())
