"""Options: the command line."""

import argparse
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.load.arms import DEFAULT, Arm, parse_arms
from tests.load.server import Endpoint
from tests.load.slo import Slo, parse_limits

KEY_VARIABLE = "OPENAI_API_KEY"
EXIT_STATUS = """exit status: 0 if all went well; 1 if the SLO was missed, a text differed from the reference's, a
request failed or none succeeded (refusals with 429 count against the SLO only); 2 if the test could not be run"""


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is to do; see `parse` for the meanings."""

    url: str
    endpoint: Endpoint
    model: str | None
    api_key: str | None
    rate: float | None
    burstiness: float
    concurrency: int | None
    sweep: bool
    trace: Path | None
    num_requests: int | None
    duration_s: float | None
    warmup: int
    prompts: tuple[str, ...]
    synthetic: int | None
    max_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int
    arms: tuple[Arm, ...]
    turns: int
    slo: Slo | None
    max_level: int
    reference: str | None
    timeout_s: float
    out: Path

    def as_json(self) -> dict[str, Any]:
        """Return the copy of the configuration; without the API key."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {
            "api_key": None if self.api_key is None else "********",
            "arms": {arm.name: arm.url for arm in self.arms},
            "slo": self.slo and {"limits_ms": dict(self.slo.limits_ms), "min_share": self.slo.min_share},
            "out": str(self.out),
            "trace": self.trace and str(self.trace),
        }


def parse(arguments: list[str] | None) -> Options:
    """Return the options of a command line; exits with 2 if they are wrong."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.sweep and given.slo is None:
        parser.error("--sweep looks for the load at which an SLO still holds: give it one, as --slo ttft=500,tpot=50")
    if given.sweep and (given.trace or given.requests):
        parser.error("--sweep goes with neither --trace nor --requests; --duration is that of each load")
    if given.trace and (given.requests or given.synthetic):
        parser.error("a trace says how many requests there are and how long: no --requests, no --synthetic")
    if given.trace and given.concurrency:
        parser.error("a trace says when requests come: no --concurrency")
    if given.burstiness is not None and (given.rate is None or given.trace):
        parser.error("--burstiness is that of --rate, without a trace")
    if given.max_level is not None and not given.sweep:
        parser.error("--max-level is that of --sweep")
    if given.requests and given.duration:
        parser.error("give --requests or --duration, not both")
    is_closed = given.rate is None and given.trace is None
    if given.arms and given.duration and is_closed and not given.sweep:
        parser.error("arms are compared on the same requests: give --requests instead of --duration")
    turns = given.turns if given.turns is not None else 5 if given.arms and not given.sweep else 1
    if turns > 1 and given.sweep:
        parser.error("--turns does not go with --sweep")
    try:
        urls = dict(_named(text) for text in given.arm_url)
        arms = parse_arms(given.arms or DEFAULT, given.url, urls)
        slo = Slo(parse_limits(given.slo), given.slo_share) if given.slo else None
        api_key = _first_word(given.api_key_file) if given.api_key_file else os.environ.get(KEY_VARIABLE)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    num_requests = given.requests
    if num_requests is None and given.duration is None and given.trace is None and not given.sweep:
        num_requests = 100
    concurrency = given.concurrency or (8 if is_closed and not given.sweep else None)
    return Options(
        url=given.url,
        endpoint=given.endpoint,
        model=given.model,
        api_key=api_key,
        rate=given.rate,
        burstiness=given.burstiness or 1.0,
        concurrency=concurrency,
        sweep=given.sweep,
        trace=given.trace,
        num_requests=num_requests,
        duration_s=given.duration or (15.0 if given.sweep else None),
        warmup=given.warmup,
        prompts=tuple(given.prompts.split(",")),
        synthetic=given.synthetic,
        max_tokens=given.max_tokens,
        ignore_eos=given.ignore_eos,
        temperature=given.temperature,
        seed=given.seed,
        arms=tuple(arms),
        turns=turns,
        slo=slo,
        max_level=given.max_level or 256,
        reference=given.reference,
        timeout_s=given.timeout,
        out=given.out or Path("load-results") / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ"),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.load",
        description="Send load to an OpenAI-compatible server, measure latencies, and check every text.",
        epilog=EXIT_STATUS,
    )
    server = parser.add_argument_group("the server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="its address, without /v1 (%(default)s)")
    server.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    server.add_argument("--model", help="a served model's name (default: the first that is served)")
    server.add_argument(
        "--api-key-file", type=Path, help=f"a file whose first word is the key (default: ${KEY_VARIABLE})"
    )
    server.add_argument("--timeout", type=_positive, default=600.0, help="seconds a request may take (%(default)g)")
    load = parser.add_argument_group("the load")
    kind = load.add_mutually_exclusive_group()
    kind.add_argument("--concurrency", type=_count, help="users who send one request after the other (8)")
    kind.add_argument("--rate", type=_positive, help="requests per second, sent whether or not others are answered")
    load.add_argument("--trace", type=Path, help="arrivals and lengths: Azure's .csv or Mooncake's .jsonl; --duration "
                      "takes its busiest window, --rate thins or multiplies it")  # fmt: skip
    load.add_argument("--sweep", action="store_true", help="find the most users, or with --rate the highest rate from "
                      "there on, at which --slo holds")  # fmt: skip
    load.add_argument("--max-level", type=_count, help="sweep: users or requests/s at most (256)")
    load.add_argument("--burstiness", type=_positive, help="with --rate: 1 is Poisson, below 1 requests come in "
                      "bursts, inf is regular (1)")  # fmt: skip
    load.add_argument("--requests", type=_count, help="how many, of each arm and turn (100)")
    load.add_argument("--duration", type=_positive, help="seconds, instead of --requests; sweep: of each load (15)")
    load.add_argument("--warmup", type=_count, default=8, help="requests of each arm that do not count (%(default)s)")
    text = parser.add_argument_group("the requests")
    text.add_argument("--prompts", default="bundled", help="files (.jsonl or paragraphs) or humaneval, mt_bench, "
                      "gsm8k, bundled; parted by commas (%(default)s)")  # fmt: skip
    text.add_argument("--synthetic", type=_count, metavar="TOKENS", help="prompts of this length, made of the prompts' "
                      "text")  # fmt: skip
    text.add_argument("--max-tokens", type=_count, default=128, help="of each text (%(default)s)")
    text.add_argument("--ignore-eos", action="store_true", help="generate --max-tokens always")
    text.add_argument("--temperature", type=float, default=0.0, help="(%(default)g)")
    text.add_argument("--seed", type=int, default=0, help="of arrivals, prompts and texts (%(default)s)")
    arms = parser.add_argument_group("what is compared and checked")
    arms.add_argument("--arms", help="take turns on the same requests: off, fixed, adaptive, limit-K, fixed-K, "
                      "default; the others are compared with off, or the first")  # fmt: skip
    arms.add_argument("--arm-url", action="append", default=[], metavar="ARM=URL", help="another server for an arm")
    arms.add_argument("--turns", type=_count, help="turns of each arm (5 with --arms, else 1)")
    arms.add_argument("--slo", help="limits in ms on each request, as ttft=500,tpot=50,e2e=9000,itl=200")
    arms.add_argument("--slo-share", type=_share, default=0.99, help="share of requests within them (%(default)g)")
    arms.add_argument("--reference", help="compare every text: a server's URL, which is asked without drafts, or "
                      "`engine`, or `engine:MODEL`: the target alone, in this process")  # fmt: skip
    arms.add_argument("--out", type=Path, help="folder for summary.json, requests.jsonl, config.json and load.png "
                      "(load-results/TIME)")  # fmt: skip
    return parser


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value


def _share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0 and at most 1")
    return value


def _first_word(path: Path) -> str:
    words = path.read_text().split()
    if not words:
        raise ValueError(f"--api-key-file: {path} holds no key")
    return words[0]


def _named(text: str) -> tuple[str, str]:
    name, sign, url = text.partition("=")
    if not sign:
        raise ValueError(f"--arm-url {text!r} is not of the form ARM=URL")
    return name, url
