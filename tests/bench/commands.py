"""python -m tests.bench COMMAND: how fast Paceline is, and where the time goes.

compare   every way to decode the same prompts, at batch 1 and 8, T = 0 and 0.7 (also `make bench JSON=path`)
methods   every drafting method with every verification rule, by domain of text;
          --large: on a target of 0.4 billion weights that writes the same text
paced     passes take as long as on named GPUs: what a round takes besides its passes, and what drafts gain
twin      the same groups in virtual time: up to 256 rows, overlaps of draft and target, draft pools, drafts that learn
plan      which draft, length, pool and number of replicas pay, from acceptance and prices; measures nothing
learning  a draft of novels that meets PEPs and SQL while it learns, against the frozen one; some ten minutes
abuse     16 clients with costly bodies: what another client notices

How a comparison is kept fair: every method gets the same token ids, ends with text, and makes the same number of tokens
per prompt, end-of-text ignored. Models are loaded in the same number format with the same number of threads (the served
application divides the cores among its processes itself, as it does for any user). Each method has a fresh process, so
that thread pools and allocators do not disturb each other, and each cell is warmed up before it is timed. All processes
exist at the same time and take the batches of a cell in turn, in an order that changes, while the others sleep: a
machine's speed drifts by half over minutes, and so it drifts for all of them alike. A ratio is the median, over turns,
of the two methods' speeds in the same turn. No method may keep the keys and values of an earlier prompt. transformers
runs at its ordinary setting (sdpa attention; assisted generation chooses its draft length itself). A served stream is
timed by its client.
"""

import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from rich.console import Console

from engine.config import BUNDLED_DRAFT, BUNDLED_HEAD, BUNDLED_TARGET, Drafting, Verification
from engine.errors import PacelineError
from tests.bench.abuse import ABUSES, EACH_S, outcomes, show_abuse
from tests.bench.audit import audit
from tests.bench.compare import CELLS, compile_models, show, write
from tests.bench.contestants.with_serve import Server
from tests.bench.learning.comparison import learning
from tests.bench.methods.comparison import methods
from tests.bench.paced.comparison import paced
from tests.bench.paced.roofline import PacedDevice
from tests.bench.paced.virtual.commands import PAIRS, PARTS, twin
from tests.bench.plan import BATCH_SIZES, POOLS, accepted_of, choices, read_prices, show_plan
from tests.bench.turns import collect
from tests.bench.workload import Arm, Cell, Workload, read_prompts

METHODS = tuple(name for name in get_args(Drafting) if name not in ("auto", "none", "mtp", "head_worker"))
"""Those of one process, on the bundled models."""
RULES = get_args(Verification)
NAMES = ("transformers", "transformers-assisted")
NAMES += ("engine-plain", "engine-speculative", "serve-plain", "serve-speculative")
PEERS = ("vllm-plain", "vllm-speculative", "vllm-probabilistic", "over-vllm-plain", "over-vllm-speculative")
"""In the environment that `make bench-peers` makes."""
Command = Callable[[Namespace, Workload, Console], list[str]]


def run(arguments: list[str]) -> int:
    """Run a command; return the exit status: 1 if something went wrong, 2 if it cannot be measured."""
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        failures: list[str] = options.run(options, console)
    except PacelineError as error:
        console.print(error, markup=False)
        return 2
    for failure in failures:
        console.print(failure, style="red", markup=False)
    return 1 if failures else 0


def _measure(command: Command, options: Namespace, console: Console) -> list[str]:
    """Run a command on the models that the options name."""
    workload = Workload(
        target=str(options.target),
        draft=str(options.draft),
        dtype="auto",
        device="auto",
        compile="auto",
        num_threads=len(os.sched_getaffinity(0)),
        prompts=read_prompts(str(options.target)),
        cells=CELLS,
        num_tokens=options.num_tokens,
        num_turns=options.turns,
    )
    return command(options, workload, console)


def parse(arguments: list[str]) -> Namespace:
    """Return the options of a command; without a command they are those of `compare`."""
    summary, details = (__doc__ or "").split("\n\n", 1)
    layout = RawDescriptionHelpFormatter
    parser = ArgumentParser("python -m tests.bench", description=summary, epilog=details, formatter_class=layout)
    commands = parser.add_subparsers(required=True)

    def add(name: str, run: Command, num_tokens: int = 128) -> ArgumentParser:
        """Add a command with the options that say which models continue prompts, and how far."""
        command = commands.add_parser(name, formatter_class=ArgumentDefaultsHelpFormatter)
        command.set_defaults(run=partial(_measure, run))
        command.add_argument("--target", type=Path, default=BUNDLED_TARGET, help="a transformers directory")
        command.add_argument("--draft", type=Path, default=BUNDLED_DRAFT, help="a transformers directory")
        command.add_argument("--num-tokens", type=int, default=num_tokens, help="new tokens per prompt")
        command.add_argument("--turns", type=int, help="batches of each cell")
        return command

    compare = add("compare", _compare)
    compare.add_argument("--only", nargs="+", choices=NAMES + PEERS, help="these methods")
    compare.add_argument("--peers", action="store_true", help="vLLM, too (`make bench-peers`)")
    compare.add_argument("--json", type=Path, help="where the rows go")
    add("abuse", _abuse)
    arms_help = "plain, speculative, adaptive, fixed-K; with -run-ahead behind it, or run-ahead alone"
    paced = add("paced", _paced, num_tokens=256)
    paced.add_argument("--pair", default="h100x4-70b+h100-1b", help="devices and models; as %(default)s")
    paced.add_argument("--streams", type=_integers, default=(1, 8, 64), help="concurrent streams, as 1,8,64")
    paced.add_argument("--arms", nargs="+", default=("plain", "speculative", "run-ahead"), help=arms_help)
    paced.add_argument("--temperatures", type=_numbers, default=(0.0, 0.7, 1.0), help="as 0,0.7,1")
    virtual = commands.add_parser("twin", formatter_class=ArgumentDefaultsHelpFormatter)
    virtual.set_defaults(run=twin)
    virtual.add_argument("parts", nargs="+", choices=tuple(PARTS), help="what is measured")
    virtual.add_argument("--pairs", nargs="+", default=PAIRS, help="devices and models")
    virtual.add_argument("--rows", type=_integers, default=(1, 8, 32, 64, 256), help="requests of a group")
    virtual.add_argument("--groups", type=_integers, default=(1, 2, 4, 6, 8), help="of `pool`: those of one draft GPU")
    virtual.add_argument("--seeds", type=int, default=3, help="repetitions with other prompts and noise")
    virtual.add_argument("--warm", type=int, default=64, help="tokens of each request before the time is taken")
    virtual.add_argument("--num-tokens", type=int, default=64, help="timed tokens of each request, on average")
    virtual.add_argument("--draft", type=Path, default=BUNDLED_DRAFT, help="of `learning`: the draft of novels")
    virtual.add_argument("--learned", type=Path, help="of `learning`: what it learned")
    learned = commands.add_parser("learning", formatter_class=ArgumentDefaultsHelpFormatter)
    learned.set_defaults(run=learning)
    learned.add_argument("--draft", type=Path, help="where the draft of novels is, or is made")
    learned.add_argument("--learned", type=Path, help="where what it learned goes, for `twin learning`")
    learned.add_argument("--svg", type=Path, help="where the picture goes")
    planned = commands.add_parser("plan", formatter_class=ArgumentDefaultsHelpFormatter)
    planned.set_defaults(run=_plan)
    planned.add_argument("--target", default="h100x4-70b", help="devices and model, as %(default)s")
    planned.add_argument("--drafts", nargs="+", default=("h100-1b", "l4-1b"), help="devices and models of drafts")
    planned.add_argument("--acceptance", default="0.75", help="a rate, or rates by position")
    prices_help = "JSON: dollars for a GPU and an hour, by its name (default: examples)"
    planned.add_argument("--prices", type=Path, help=prices_help)
    planned.add_argument("--tokens-per-s", type=float, help="of all replicas: how many are needed?")
    methods = add("methods", _methods, num_tokens=48)
    methods.add_argument("--large", action="store_true", help="on the large target")
    methods.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="who drafts")
    methods.add_argument("--rules", nargs="+", choices=RULES, default=RULES, help="who verifies")
    methods.add_argument("--lengths", type=_integers, default=(2, 4, 8, 16), help="draft lengths, as 2,4,8,16")
    methods.add_argument("--batch-sizes", type=_integers, default=(1, 8), help="as 1,8")
    methods.add_argument("--temperatures", type=_numbers, default=(0.0, 0.7), help="as 0,0.7")
    is_command = arguments and (arguments[0] in commands.choices or arguments[0] in ("-h", "--help"))
    return parser.parse_args(arguments if is_command else ["compare", *arguments])


def _compare(options: Namespace, workload: Workload, console: Console) -> list[str]:
    names = options.only or (NAMES + PEERS if options.peers else NAMES)
    compile_models(workload, console)
    rows, failures = collect(names, workload, console)
    show(rows, workload, console)
    failures += audit(rows, workload, console)
    if options.json is not None:
        write(rows, options.json)
    return failures


def _methods(options: Namespace, workload: Workload, console: Console) -> list[str]:
    if any(method.startswith("head") for method in options.methods):
        workload = replace(workload, head=str(BUNDLED_HEAD))
    compile_models(workload, console)
    methods(options, workload, console)
    return []


def _paced(options: Namespace, workload: Workload, console: Console) -> list[str]:
    for arm in options.arms:
        _ = Arm.of(arm, workload.num_speculative_tokens).settings
    cells = [Cell(size, heat) for size in options.streams for heat in options.temperatures]
    workload = replace(workload, device="cpu", cells=cells)
    return paced(workload, options.pair, options.arms, console)


def _plan(options: Namespace, console: Console) -> list[str]:
    accepted, prices = accepted_of(options.acceptance), read_prices(options.prices)
    target, drafts = PacedDevice.of(options.target), list(map(PacedDevice.of, options.drafts))
    planned = choices(target, drafts, accepted, prices, BATCH_SIZES, POOLS, options.tokens_per_s)
    show_plan(list(planned), target.name, console)
    return []


def _abuse(options: Namespace, workload: Workload, console: Console) -> list[str]:
    compile_models(workload, console)
    with closing(Server(workload, {})) as server:
        rows = list(outcomes(server.url, list(ABUSES), EACH_S))
    show_abuse(rows, console)
    return [problem for row in rows for problem in row.failures]


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))
