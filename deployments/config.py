"""AppConfig: every setting of an operator, with defaults for a laptop.

`serve run deployments:app name=value ...` passes flat strings; a Serve config file passes typed, nested `args:`.
`PACELINE_API_KEY` is the only setting read from the environment.
"""

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import click
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from cluster.config import DraftLearning, LogFormat, RunAhead
from engine.config import BUNDLED_TARGET, PAIR_SETTINGS, PairConfig, complaint, unknown_argument
from engine.drafting.settle import Settled, check_learning, check_run_ahead, settle
from engine.errors import ConfigError

API_KEY_VARIABLE = "PACELINE_API_KEY"
BUNDLED_NAME = "paceline"


class ArgumentError(click.ClickException):
    """An application argument is wrong; the message is one line, and commands exit with 1."""


def _none_from_text(value: object) -> object:
    return None if isinstance(value, str) and value.lower() == "none" else value


# The command line has only strings.
OrNone = BeforeValidator(_none_from_text)
FROM_WORDS = BeforeValidator(lambda value: value.split() if isinstance(value, str) else value)
FROM_JSON = BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value)
FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Limits(BaseModel):
    """Limits of one request."""

    model_config = FROZEN

    max_body_bytes: int = Field(2**20, ge=1024)
    """Bytes of a request body, sent whole or in chunks."""
    max_n: int = Field(8, ge=1, le=128)
    """Choices per prompt."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Seconds from a request's arrival to its last token."""


class LabelSelector(BaseModel):
    """Labels that nodes must have, in Ray's notation: {"pool": "big"}, {"ray.io/accelerator-type": "in(H100,H200)"}."""

    model_config = FROZEN

    target: dict[str, str] = {}
    """Labels that the nodes of the target's ranks and of the Router must have."""
    draft: dict[str, str] = {}
    """Labels that the draft's node must have."""
    ingress: dict[str, str] = {}
    """Labels that the nodes of the Ingress replicas must have."""


class Autoscaling(BaseModel):
    """Number of Router replicas, each with its own speculation group, and when it changes."""

    model_config = FROZEN

    min_replicas: int = Field(1, ge=1)
    """Fewest replicas."""
    max_replicas: int | None = Field(None, ge=1)
    """Most replicas; their number follows the queue depth. None is min_replicas, a fixed number."""
    requests_per_replica: int = Field(12, ge=1)
    """Waiting and running requests per replica that autoscaling aims at. If it is near a replica's capacity, requests
    wait while a new replica starts."""
    downscale_delay_s: float = Field(300.0, ge=0)
    """Seconds during which fewer replicas would have had at most four fifths of requests_per_replica each, before
    replicas are removed. Their running streams finish first."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.upper_bound < self.min_replicas:
            raise ConfigError(f"autoscaling: max_replicas {self.max_replicas} < min_replicas {self.min_replicas}")
        return self

    @property
    def upper_bound(self) -> int:
        return self.min_replicas if self.max_replicas is None else self.max_replicas


class PoolSize(BaseModel):
    """Number of draft workers that all Routers share, and when it changes."""

    model_config = FROZEN

    replicas: int = Field(1, ge=1)
    """Fewest draft workers."""
    max_replicas: int | None = Field(None, ge=1)
    """Most draft workers; their number follows the share of time in which they draft. None is replicas, a fixed
    number."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.upper_bound < self.replicas:
            raise ConfigError(f"draft_pool: max_replicas {self.max_replicas} < replicas {self.replicas}")
        return self

    @property
    def upper_bound(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas


class AppConfig(BaseModel):
    """The application's settings."""

    model_config = FROZEN

    pair: PairConfig = PairConfig()
    """The models and the engine. Its fields are arguments like all others; there is no argument of this name."""
    served_model_name: Annotated[str | None, OrNone] = None
    """The model's name for clients; none is the last part of target_model."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Target ranks that share the target's weights."""
    label_selector: Annotated[LabelSelector, FROM_JSON] = LabelSelector()
    """Labels that the nodes of the target, of the draft and of the Ingress replicas must have."""
    run_ahead: RunAhead = "auto"
    """Whether the draft drafts for the likeliest verdicts while the target verifies: auto, on or off; auto is on where
    each model has a device or cores of its own."""
    draft_learning: DraftLearning = "off"
    """on: while it is idle, the draft worker trains its draft on the texts that it drafts for, and drafts with it where
    it became better; the text stays the same. All who share the worker share what it learned."""
    draft_learning_share: float = Field(0.5, gt=0, le=1)
    """Share of the draft worker's idle time in which it may learn."""
    draft_learning_path: Annotated[Path | None, OrNone] = None
    """A file on the draft worker's node that keeps what was learned; none drops it when the worker ends."""
    round_timeout_s: float = Field(60.0, gt=0)
    """Seconds that a round waits for the target, at most, before the target counts as lost and is restarted; once eight
    rounds like it were measured, 20 times the longest, but no less than 5 s. A replica that finishes no round for twice
    this setting, while there is work, is replaced."""
    hang_timeout_s: float = Field(10.0, gt=0)
    """Seconds without an answer after which the process of a worker or a Router is replaced."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds that a start may take: of a Router with its workers, or of an Ingress."""
    stream_interval_s: float = Field(0.02, ge=0)
    """Seconds between two chunks of a stream, at least; the last tokens are sent at once. 0 sends a chunk per round."""
    drain_timeout_s: float = Field(300.0, gt=0)
    """Seconds that running streams may take to finish at shutdown, before they end with an error. If autoscaling
    removes a replica, they have limits.request_timeout_s, so that none is cut."""
    log_format: LogFormat = "text"
    """Format of the log of all processes: text, or json with one object per line."""
    api_keys: tuple[SecretStr, ...] = ()
    """API keys, of which every request must have one; PACELINE_API_KEY in the environment adds more. Without keys,
    every request is accepted."""
    api_key_file: Annotated[Path | None, OrNone] = None
    """A file with more keys, one per line."""
    share_between_keys: bool = False
    """Whether requests of different API keys share cached prefixes and copied drafts, which tell a client what others
    have sent and got; off, a system prompt is computed once for each key."""
    cors_allow_origins: Annotated[tuple[str, ...], FROM_WORDS] = ()
    """Origins of web pages that may call the API from a browser (`https://chat.example.com`), or `*` for all."""
    page: Literal["on", "off", "demo"] = "on"
    """Whether `/` is a page to chat, compare and watch rounds; demo lets its visitors also kill processes."""
    record: Annotated[Path | None, OrNone, AfterValidator(lambda path: path and path.absolute())] = None
    """A folder in which each Ingress keeps the records of its answers, for `paceline audit`; none keeps no records. It
    holds prompts and texts, 1 GiB at most; the oldest files go. Of requests with a `cache_salt`, only those that ask
    for their record are kept."""
    num_ingress_replicas: Annotated[int | None, OrNone] = Field(None, ge=1)
    """Processes that serve HTTP and tokenize; none is one per 8 CPUs of the cluster, at most 4."""
    autoscaling: Annotated[Autoscaling, FROM_JSON] = Autoscaling()
    """Number of Router replicas, and when it changes."""
    draft_pool: Annotated[PoolSize | None, FROM_JSON, OrNone] = None
    """Draft workers that all Routers share; none is one for each Router."""
    limits: Annotated[Limits, FROM_JSON] = Limits()
    """Limits of one request."""

    @model_validator(mode="before")
    @classmethod
    def _gather_pair(cls, arguments: Any) -> Any:
        if not isinstance(arguments, dict):
            return arguments
        if "pair" in arguments:
            raise ArgumentError(unknown_argument("pair", PAIR_SETTINGS))
        pair = {name: value for name, value in arguments.items() if name in PAIR_SETTINGS}
        for name in pair:
            if PAIR_SETTINGS[name].default is None:
                pair[name] = _none_from_text(pair[name])
        return {"pair": pair, **{name: value for name, value in arguments.items() if name not in pair}}

    @model_validator(mode="after")
    def _check_drafting(self) -> Self:
        check_run_ahead(self.settled.engine, self.run_ahead)
        method = self.settled.method
        if self.draft_pool is not None and (method.runs_in != "draft" or method.reads_features):
            names = ("draft_model", "drafting", "speculation", "num_speculative_tokens")
            settings = ", ".join(f"{name} is {getattr(self.pair, name)}" for name in names)
            why = "its head reads what one target computes" if method.reads_features else "no draft worker is needed"
            raise ConfigError(f"draft_pool is set, but {settings}: {why}")
        if self.draft_learning == "on":
            check_learning(self.settled.engine)
        return self

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate what Serve passes; raise ArgumentError that names each wrong argument."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            names = PAIR_SETTINGS.keys() | cls.model_fields.keys() - {"pair"}
            raise ArgumentError(complaint(error, names)) from None
        except ConfigError as error:
            raise ArgumentError(str(error)) from None

    @cached_property
    def settled(self) -> Settled:
        return settle(self.pair)

    @property
    def model_name(self) -> str:
        if self.served_model_name is not None:
            return self.served_model_name
        path = self.settled.target.path
        return BUNDLED_NAME if path == str(BUNDLED_TARGET) else Path(path).name


def api_keys(config: AppConfig) -> tuple[str, ...]:
    """Return the API keys of the settings, the file and the environment; raise ArgumentError for a wrong key."""
    keys = [key.get_secret_value() for key in config.api_keys]
    if config.api_key_file is not None:
        try:
            lines = config.api_key_file.read_text().split()
        except (OSError, ValueError) as error:
            raise ArgumentError(f"api_key_file: {error}") from None
        if not lines:
            raise ArgumentError(f"api_key_file: {config.api_key_file} holds no key")
        keys += lines
    keys += os.environ.get(API_KEY_VARIABLE, "").split()
    if any(not key.isascii() or not key.isprintable() or not key for key in keys):
        raise ArgumentError("api_keys: a key is empty or holds characters that no header can carry")
    keys = list(dict.fromkeys(keys))
    if config.draft_learning == "on" and len(keys) > 1 and not config.share_between_keys:
        raise ArgumentError(
            f"draft_learning is on with {len(keys)} api_keys, which share what the draft learns from their texts; "
            "set share_between_keys=true to allow it"
        )
    return tuple(keys)
