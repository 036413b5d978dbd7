"""python -m tests.bench COMMAND: how fast Paceline is, and where the time goes.

compare   every method on the same prompts, at batch 1 and 8, T = 0 and 0.7 (also `make bench JSON=path`)
profile   what the parts of a round cost, in process and served
batch     tokens/s of the engine at 1 to 32 rows
prefill   prompt tokens/s, and time to first token beside a full batch
methods   every drafting method with every verification rule, by domain of text, beside transformers' own methods;
          --large: on a target of 0.4 billion weights that writes the same text
bandwidth a random model of half a billion weights: the share of the memory's bandwidth that decoding reaches
load      tokens/s and latency of the served application at 1 to 32 streams
paced     passes take as long as on named GPUs: what a round takes besides its passes, and what drafts gain
timeline  a picture of some rounds, with the draft running ahead on a core of its own
simulate  the engine over simulated models, whose passes take virtual time;
          --cluster: 1 to 100 groups under a production trace, scaled by the service's own policy
autoscaling  a picture of a step in load: queue, decision and replicas over time, with and without moving requests
burst     600 requests at once, then 50 a second too many: how soon and at what cost they are refused
abuse     16 clients with costly bodies: what another client notices
soak      16 clients with good, bad and abandoned requests for two minutes: errors, leaks, memory

How a comparison is kept fair: every method gets the same token ids, ends with text, and makes the same number of tokens
per prompt, end-of-text ignored. Models are loaded in the same number format with the same number of threads (the served
application divides the cores among its processes itself, as it does for any user). Each method has a fresh process, so
that thread pools and allocators do not disturb each other, and each cell is warmed up before it is timed. All processes
exist at the same time and take the batches of a cell in turn, in an order that changes, while the others sleep: a
machine's speed drifts by half over minutes, and so it drifts for all of them alike. A ratio is the median, over turns,
of the two methods' speeds in the same turn. No method may keep the keys and values of an earlier prompt. transformers
runs at its best ordinary setting (sdpa attention; assisted generation both with its own draft length and with ours, the
faster one counts). A served stream is timed by its client.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

from rich.console import Console

from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET, Drafting, Dtype, Verification
from tests.bench import cluster_tables, simulate
from tests.bench.abuse import abuse
from tests.bench.arrivals import CONVERSATIONS
from tests.bench.autoscaling import autoscaling
from tests.bench.bandwidth import bandwidth
from tests.bench.burst import burst
from tests.bench.compare import CELLS, NAMES, PEERS, show, write
from tests.bench.compiled_models import compile_models
from tests.bench.curves import batch_curve, load_curve
from tests.bench.methods import Selection, methods, show_parts
from tests.bench.paced import ARMS, PACED_TOKENS, PAIR, STREAMS, TEMPERATURES, paced
from tests.bench.pictures import PICTURES
from tests.bench.prefill import prefill
from tests.bench.profile import profile
from tests.bench.served_group import check_served
from tests.bench.soak import soak
from tests.bench.timeline import timeline
from tests.bench.turns import collect
from tests.bench.with_llama_cpp import reason_to_skip
from tests.bench.worker import Setting
from tests.bench.workload import NUM_TOKENS, Workload, read_prompts

METHODS = tuple(name for name in get_args(Drafting) if name not in ("auto", "none"))
RULES = get_args(Verification)
DTYPES = get_args(Dtype)
METHOD_TOKENS = 48
ADAPTIVE_METHODS = ("model", "model+suffix")
ADAPTIVE_HELP = "methods: those that are measured with speculation=adaptive, too"
COMMANDS = (
    "compare",
    "profile",
    "batch",
    "prefill",
    "methods",
    "bandwidth",
    "load",
    "paced",
    "timeline",
    "simulate",
    "autoscaling",
    "burst",
    "abuse",
    "soak",
)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    workload = Workload(
        target=str(options.target),
        draft=str(options.draft),
        dtype=options.dtype,
        device=options.device,
        compile=options.compile,
        num_threads=options.threads,
        prompts=read_prompts(str(options.target)),
        cells=CELLS,
        num_tokens=options.num_tokens or NUM_TOKENS,
    )
    failures = _run(options, workload, console)
    for failure in failures:
        console.print(failure, style="red", markup=False)
    return 1 if failures else 0


def _run(options: argparse.Namespace, workload: Workload, console: Console) -> list[str]:
    if options.command == "autoscaling":  # it has a pair of its own
        autoscaling(options.png or PICTURES / "autoscaling.png", console)
        return []
    if options.command == "methods" and options.parts:
        show_parts(options.parts, console, json=options.json, png=options.png or PICTURES / "methods.png")
        return []
    compile_models(workload, console)
    if options.command == "profile":
        profile(workload, console)
        return []
    if options.command == "timeline":
        timeline(workload, options.png or PICTURES / "timeline.png", console)
        return []
    if options.command == "paced":
        return paced(
            replace(workload, num_tokens=options.num_tokens or PACED_TOKENS, num_turns=options.turns),
            options.pair,
            console,
            streams=options.streams,
            temperatures=options.temperatures,
            arms=options.arms,
            json=options.json,
            png=options.png or PICTURES / "paced.png",
        )
    if options.command == "methods":
        selection = Selection(
            methods=options.methods,
            rules=options.rules,
            lengths=options.lengths,
            adaptive=options.adaptive,
            temperatures=options.temperatures,
            batch_sizes=options.batch_sizes,
            domains=options.domains,
            minutes=options.minutes,
            large=options.large,
            self_draft_layers=options.self_draft_layers,
            peer_dtype=options.peer_dtype or options.dtype,
        )
        measured = replace(workload, num_turns=options.turns, num_tokens=options.num_tokens or METHOD_TOKENS)
        methods(measured, selection, console, json=options.json, png=options.png)
        return []
    if options.command == "bandwidth":
        bandwidth(workload, console)
        return []
    if options.command == "simulate" and options.cluster and options.served:
        console.print(check_served())
        return []
    if options.command == "simulate" and options.cluster:
        return cluster_tables.run(workload, options.trace, console)
    if options.command == "simulate":
        simulate.run(workload, console)
        return []
    if options.command == "batch":
        return batch_curve(workload, options.png or PICTURES / "batch.png", console)
    if options.command == "load":
        return load_curve(workload, options.png or PICTURES / "load.png", console)
    if options.command == "burst":
        return burst(workload, console)
    if options.command == "abuse":
        return abuse(workload, console)
    if options.command == "soak":
        return soak(workload, console)
    if options.command == "prefill":
        rows, failures = prefill(workload, console)
    else:
        names = options.only or (NAMES + PEERS if options.peers else NAMES)
        if not options.only and options.peers and (reason := reason_to_skip()) is not None:
            names = tuple(name for name in names if not name.startswith("llama.cpp-"))
            console.print(f"llama.cpp is left out: {reason}")
        rows, failures = collect(names, workload, console)
        show(rows, workload, console)
    if options.json is not None:
        write(rows, options.json)
    return failures


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    summary, details = __doc__.split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=COMMANDS,
        default="compare",
    )
    parser.add_argument("--json", type=Path, help="compare, prefill, methods, paced: where the rows go")
    parser.add_argument("--only", nargs="+", choices=NAMES + PEERS, help="compare: these methods")
    parser.add_argument("--peers", action="store_true", help="compare: vLLM (`make bench-peers`) and llama.cpp too")
    parser.add_argument("--png", type=Path, help="where a plot goes (default: plots/; methods: none unless of --parts)")
    parser.add_argument("--cluster", action="store_true", help="simulate: a cluster under a trace")
    parser.add_argument("--served", action="store_true", help="simulate --cluster: only beside a served run; 4 minutes")
    parser.add_argument("--trace", type=Path, default=CONVERSATIONS, help="simulate: Azure's CSV file (%(default)s)")
    parser.add_argument("--target", type=Path, default=BUNDLED_TARGET, help="a transformers directory")
    parser.add_argument("--draft", type=Path, default=BUNDLED_DRAFT, help="a transformers directory")
    parser.add_argument("--compile", choices=("auto", "off"), default="auto", help="off: measure eager passes")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads (%(default)s)")
    parser.add_argument("--num-tokens", type=int, help="new tokens per prompt (128; paced: 256; methods: 48)")
    parser.add_argument("--pair", default=PAIR, help="paced: as %(default)s; /shared behind it: one device")
    parser.add_argument("--streams", type=_numbers, default=STREAMS, help="paced: concurrent streams, as 1,8,64")
    parser.add_argument("--temperatures", type=_temperatures, default=TEMPERATURES, help="paced: as 0,0.7,1")
    parser.add_argument("--turns", type=int, help="paced, methods: batches of each cell")
    parser.add_argument("--large", action="store_true", help="methods: on the large target")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods: who drafts")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="methods: who verifies")
    parser.add_argument("--lengths", type=_numbers, default=(2, 4, 8, 16), help="methods: draft lengths, as 2,4,8,16")
    parser.add_argument("--batch-sizes", type=_numbers, default=(1, 8), help="methods: as 1,8")
    parser.add_argument("--domains", nargs="+", default=[], help="methods: these domains of text (default: all)")
    parser.add_argument("--adaptive", nargs="*", choices=METHODS, default=ADAPTIVE_METHODS, help=ADAPTIVE_HELP)
    parser.add_argument("--self-draft-layers", type=int, default=4, help="methods: of drafting=self")
    parser.add_argument("--peer-dtype", choices=DTYPES, help="methods: of transformers, if it is faster in another one")
    parser.add_argument("--minutes", type=float, default=30.0, help="methods: skip cells that would end later")
    parser.add_argument("--parts", nargs="+", type=Path, help="methods: measure nothing, show these JSON files")
    parser.add_argument(
        "--arms",
        nargs="+",
        type=_arm,
        default=ARMS,
        help="paced: plain, speculative, adaptive, fixed-K; with -run-ahead behind it, or run-ahead alone",
    )
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _arm(text: str) -> str:
    Setting.of(text, 0)
    return text


if __name__ == "__main__":
    sys.exit(main())
