"""Options: what a run is to do, and the command line that says so."""

import argparse
import os
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from .arms import DEFAULT, Arm, parse_arms
from .records import Slo
from .server import Endpoint

KEY_VARIABLE = "OPENAI_API_KEY"
EXIT_STATUS = """exit status: 0 if all went well; 1 if the SLO was missed, a text differed from the reference's, a
request failed or none succeeded (refusals with 429 count against the SLO only); 2 if the test could not be run"""


class Options(BaseModel):
    """What a run is to do; the field `max_tokens` is `--max-tokens` of the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    url: str = "http://127.0.0.1:8000"
    """the server's address, without /v1"""
    endpoint: Endpoint = "completions"
    """completions or chat"""
    model: str | None = None
    """a served model's name (default: the first that is served)"""
    api_key_file: Path | None = None
    """a file whose first word is the key (default: $OPENAI_API_KEY)"""
    timeout: PositiveFloat = 600.0
    """seconds a request may take"""
    concurrency: PositiveInt | None = None
    """users who send one request after the other (default: 8)"""
    rate: PositiveFloat | None = None
    """requests per second, sent whether or not others are answered"""
    trace: Path | None = None
    """arrivals and lengths: Azure's .csv or Mooncake's .jsonl; --duration takes its busiest window, --rate thins or
    multiplies it"""
    sweep: bool = False
    """find the most users, or with --rate the highest rate from there on, at which --slo holds"""
    burstiness: PositiveFloat | None = None
    """with --rate: 1 is Poisson, below 1 requests come in bursts, inf is regular (default: 1)"""
    requests: PositiveInt | None = None
    """how many, of each arm and turn (default: 100)"""
    duration: PositiveFloat | None = None
    """seconds, instead of --requests; sweep: of each load (default: 15)"""
    warmup: PositiveInt = 8
    """requests of each arm that do not count"""
    prompts: str = "bundled"
    """files (.jsonl or paragraphs) or humaneval, mt_bench, gsm8k, bundled; parted by commas"""
    max_tokens: PositiveInt = 128
    """of each text"""
    ignore_eos: bool = False
    """generate --max-tokens always"""
    temperature: float = 0.0
    """of all requests"""
    seed: int = 0
    """of arrivals, prompts and texts"""
    arms: str = DEFAULT
    """take turns on the same requests: off, fixed, adaptive, limit-K, fixed-K, default; the others are compared with
    off, or the first"""
    arm_url: tuple[str, ...] = ()
    """ARM=URL: another server for an arm"""
    turns: PositiveInt | None = None
    """turns of each arm (default: 5 with --arms, else 1)"""
    slo: str | None = None
    """limits in ms on each request, as ttft=500,tpot=50,e2e=9000,itl=200"""
    slo_share: Annotated[float, Field(gt=0, le=1)] = 0.99
    """share of requests within them"""
    reference: str | None = None
    """check every text: `engine` or `engine:MODEL` audits it by the target in this process; a server's URL is asked for
    it without drafts"""
    out: Path = Field(default_factory=lambda: Path("load-results") / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ"))
    """folder for summary.json, requests.jsonl, records.jsonl and config.json (default: load-results/TIME)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_closed = self.rate is None and self.trace is None
        is_fixed = self.arms == DEFAULT or self.requests or self.sweep
        for is_wrong, message in (
            (self.rate and self.concurrency, "give --rate or --concurrency, not both"),
            (self.sweep and not self.slo, "--sweep looks for the load at which an SLO still holds: give it --slo"),
            (self.sweep and (self.trace or self.requests), "--sweep goes with neither --trace nor --requests"),
            (self.trace and (self.requests or self.concurrency), "--trace says when how many requests come"),
            (self.burstiness and (self.trace or not self.rate), "--burstiness is that of --rate, without a trace"),
            (self.requests and self.duration, "give --requests or --duration, not both"),
            (self.duration and is_closed and not is_fixed, "arms are compared on the same requests: give --requests"),
            (self.sweep and (self.turns or 1) > 1, "--turns does not go with --sweep"),
        ):
            if is_wrong:
                raise ValueError(message)
        _ = self.api_key, self.arm_list, self.limits
        return self

    @cached_property
    def api_key(self) -> str | None:
        if self.api_key_file is None:
            return os.environ.get(KEY_VARIABLE)
        try:
            return self.api_key_file.read_text().split()[0]
        except (OSError, IndexError) as error:
            raise ValueError(f"{self.api_key_file} holds no key: {error}") from error

    @cached_property
    def arm_list(self) -> list[Arm]:
        if unnamed := [text for text in self.arm_url if "=" not in text]:
            raise ValueError(f"--arm-url {unnamed[0]!r} is not of the form ARM=URL")
        return parse_arms(self.arms, self.url, dict(text.split("=", 1) for text in self.arm_url))

    @cached_property
    def limits(self) -> Slo | None:
        return Slo.parse(self.slo, self.slo_share) if self.slo else None

    @property
    def num_turns(self) -> int:
        return self.turns or (5 if self.arms != DEFAULT and not self.sweep else 1)

    @property
    def num_requests(self) -> int | None:
        is_counted = self.duration is None and self.trace is None and not self.sweep
        return self.requests or (100 if is_counted else None)

    @property
    def duration_s(self) -> float | None:
        return self.duration or (15.0 if self.sweep else None)


def parse(arguments: list[str] | None) -> Options:
    """Return the options of a command line; exits with 2 if they are wrong."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Send load to an OpenAI-compatible server, measure latencies, and check every text.",
        epilog=EXIT_STATUS,
    )
    for name, field in Options.model_fields.items():
        action = "store_true" if field.annotation is bool else "append" if name == "arm_url" else "store"
        shown = f" ({field.default})" if field.default not in (None, False, ()) and not field.default_factory else ""
        text = " ".join((field.description or "").split()) + shown
        parser.add_argument(f"--{name.replace('_', '-')}", action=action, default=argparse.SUPPRESS, help=text)
    try:
        return Options.model_validate(vars(parser.parse_args(arguments)))
    except ValidationError as error:
        parser.error("; ".join(f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors()))
