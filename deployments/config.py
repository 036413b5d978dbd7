"""AppConfig: everything an operator may set, with defaults for a laptop.

`serve run deployments:app name=value ...` passes flat strings; a Serve config file passes typed, nested `args:`. Both
are validated here, and a wrong name or value is refused in one line. The settings of the models and the engine are
those of `engine.config.PairConfig`, written beside the others. `PACELINE_API_KEY`, the only setting that may be an
environment variable, is read here.
"""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import click
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator

from cluster.config import GroupConfig, RunAhead
from cluster.log_format import LogFormat
from engine.config import BUNDLED, PAIR_SETTINGS, PairConfig, unknown_argument
from engine.drafting.registry import check_run_ahead, settle_drafting
from engine.drafting.skip_list import SETTING as SKIP_LIST
from engine.drafting.skip_list import read_skip_list
from engine.errors import ConfigError

API_KEY_VARIABLE = "PACELINE_API_KEY"
BUNDLED_NAME = "paceline"


class ArgumentError(click.UsageError):
    """An application argument that does not exist or does not fit; one line on the command line."""


def _none_from_text(value: object) -> object:
    """Let the command line, which has strings only, say `none`."""
    return None if isinstance(value, str) and value.lower() == "none" else value


def _list_from_text(value: object) -> object:
    """Let the command line give a list as words."""
    return value.split() if isinstance(value, str) else value


def _object_from_text(value: object) -> object:
    """Let the command line give a nested setting as JSON."""
    return json.loads(value) if isinstance(value, str) else value


OrNone = BeforeValidator(_none_from_text)
FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Limits(BaseModel):
    """What one request may ask for."""

    model_config = FROZEN

    max_body_bytes: int = Field(4 * 2**20, ge=1024)
    """Bytes of a request body, sent whole or in chunks."""
    max_header_bytes: int = Field(16 * 2**10, ge=1024)
    """Bytes of all request headers together."""
    header_timeout_s: float = Field(10.0, gt=0)
    """Seconds in which a client must have sent the headers of a request, if HAProxy is the proxy."""
    body_timeout_s: float = Field(60.0, gt=0)
    """Seconds in which a client must have sent the body."""
    max_connections_per_address: Annotated[int | None, OrNone] = Field(1000, ge=1)
    """Connections from one address, if HAProxy is the proxy; none is any number, for behind a load balancer."""
    max_prompts: int = Field(64, ge=1)
    """Prompts in one completion request."""
    max_messages: int = Field(1024, ge=1)
    """Messages in one chat request."""
    max_values: int = Field(2**16, ge=1024)
    """Strings, numbers, lists and objects in one request body, without token ids."""
    max_n: int = Field(8, ge=1, le=128)
    """Choices per prompt."""
    max_stop: int = Field(4, ge=1)
    """Stop strings."""
    max_stop_chars: int = Field(64, ge=1)
    """Characters of one stop string."""
    max_stop_token_ids: int = Field(64, ge=1)
    """Stop token ids."""
    max_logprobs: int = Field(20, ge=0, le=20)
    """Alternatives listed per token."""
    max_prompt_logprobs: int = Field(2**19, ge=1)
    """Log probabilities of the tokens of prompts and their alternatives, in one answer, all choices together."""
    max_logit_bias: int = Field(300, ge=1)
    """Tokens with a bias."""
    max_grammar_chars: int = Field(2**16, ge=1)
    """Characters of a JSON schema, a regular expression, a grammar, or of all choices together."""
    grammar_timeout_s: float = Field(0.5, gt=0)
    """Seconds of processor time that compiling a schema, an expression or a grammar may take. Its first use holds all
    streams of a Router up for as long."""
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
    """How many Router replicas, each with its own speculation group, and when to have more."""

    model_config = FROZEN

    min_replicas: int = Field(1, ge=1)
    """Fewest replicas."""
    max_replicas: int | None = Field(None, ge=1)
    """Most replicas; in between, their number follows the queue depth. None takes min_replicas, a fixed number."""
    requests_per_replica: int = Field(12, ge=1)
    """Waiting and running requests per replica that autoscaling aims at. If it is near a replica's capacity, requests
    wait while a new replica starts; `python -m tests.bench simulate --cluster` shows for how long."""
    upscale_delay_s: float = Field(1.0, ge=0)
    """Seconds with more requests than requests_per_replica before replicas are added; measuring takes up to 1.7 s
    more."""
    downscale_delay_s: float = Field(300.0, ge=0)
    """Seconds in which fewer replicas would have had at most four fifths of requests_per_replica, before replicas are
    removed. Their running streams finish first."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.upper_bound < self.min_replicas:
            raise ConfigError(f"autoscaling: max_replicas {self.max_replicas} < min_replicas {self.min_replicas}")
        return self

    @property
    def upper_bound(self) -> int:
        """Replicas at most."""
        return self.min_replicas if self.max_replicas is None else self.max_replicas


class AppConfig(BaseModel):
    """The application's settings."""

    model_config = FROZEN

    pair: PairConfig = PairConfig()
    """The models and the engine. As arguments its fields are written beside the others, without this name."""
    served_model_name: Annotated[str | None, OrNone] = None
    """What clients call the model; none takes the last part of target_model."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Target ranks that share the target's weights."""
    target_accelerator_type: Annotated[str | None, OrNone] = None
    """Ray's name of the GPU type that each target rank needs, such as `H100`; none takes any."""
    draft_accelerator_type: Annotated[str | None, OrNone] = None
    """Ray's name of the GPU type that the draft needs, which may be a cheaper one, such as `L4`; none takes any."""
    target_nodes: int = Field(1, ge=1)
    """Nodes that the target's ranks may be spread over; 1 keeps them on one."""
    label_selector: Annotated[LabelSelector, BeforeValidator(_object_from_text)] = LabelSelector()
    """Labels that the nodes of the target, of the draft and of the Ingress replicas must have."""
    run_ahead: RunAhead = "auto"
    """Whether the draft drafts for the likeliest verdicts while the target verifies: auto, on or off; auto is on where
    each model has a device or cores of its own."""
    draft_timeout_s: float = Field(1.0, gt=0)
    """Seconds that a round waits for its drafts before it goes on without them."""
    verify_timeout_s: float = Field(60.0, gt=0)
    """Seconds that a round waits for the target before the target counts as lost."""
    hang_timeout_s: float = Field(10.0, gt=0)
    """Seconds without any answer after which the process of a worker or a Router is replaced, or of an Ingress that
    starts."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds that placing and loading the workers may take, and the start of an Ingress."""
    stream_interval_s: float = Field(0.02, ge=0)
    """Seconds for which a stream gathers tokens after each chunk; the last tokens are sent at once. 0 sends a chunk per
    round."""
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    """Acceptance figures in every response, in vLLM's format: none, summary or detailed. A request can choose its own
    by `speculative.metrics`."""
    max_recoveries: int = Field(3, ge=0)
    """Target restarts in a row, without a finished round between them, before clients get an error."""
    round_timeout_s: float = Field(120.0, gt=0)
    """Seconds without a finished round, while there is work, after which a replica counts as unhealthy."""
    drain_timeout_s: float = Field(300.0, gt=0)
    """Seconds that running streams may take to finish at shutdown; then they end with an error. Where autoscaling
    removes a replica, they may take limits.request_timeout_s, so that none is cut."""
    log_format: LogFormat = "text"
    """How all processes write their log: text, or json: one object per line."""
    api_keys: tuple[SecretStr, ...] = ()
    """API keys; every request must have one of them. Also read from the environment variable PACELINE_API_KEY. Without
    keys, every request is accepted."""
    api_key_file: Annotated[Path | None, OrNone] = None
    """A file with more keys, one per line."""
    cors_allow_origins: Annotated[tuple[str, ...], BeforeValidator(_list_from_text)] = ()
    """Web pages that may call the API from a browser, by origin (`https://chat.example.com`), or `*` for all."""
    num_ingress_replicas: Annotated[int | None, OrNone] = Field(None, ge=1)
    """Processes that serve HTTP and tokenize; none is one for each 8 CPUs of the cluster, at most 4."""
    autoscaling: Annotated[Autoscaling, BeforeValidator(_object_from_text)] = Autoscaling()
    """How many Router replicas there are, and when there are more."""
    limits: Annotated[Limits, BeforeValidator(_object_from_text)] = Limits()
    """What one request may ask for."""

    @model_validator(mode="before")
    @classmethod
    def _gather_pair(cls, arguments: Any) -> Any:
        """Move the pair's settings from beside the others into `pair`."""
        if not isinstance(arguments, dict):
            return arguments
        if "pair" in arguments:
            raise ArgumentError(unknown_argument("pair", PAIR_SETTINGS))
        pair = {name: value for name, value in arguments.items() if name in PAIR_SETTINGS}
        for name in pair:
            if PAIR_SETTINGS[name].default is None:
                pair[name] = _none_from_text(pair[name])
        if SKIP_LIST in pair:
            pair[SKIP_LIST] = read_skip_list(pair[SKIP_LIST])
        return {"pair": pair, **{name: value for name, value in arguments.items() if name not in pair}}

    @model_validator(mode="after")
    def _check_drafting(self) -> Self:
        settle_drafting(self.pair)
        check_run_ahead(self.pair.engine, self.run_ahead, has_draft_model=self.pair.draft is not None)
        return self

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate what Serve passes; the error is one line that names the argument.

        Raises:
            ArgumentError: an unknown argument, or a value that does not fit.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise ArgumentError("; ".join(_complaints(cls, error))) from None
        except ConfigError as error:
            raise ArgumentError(str(error)) from None

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        if self.served_model_name is not None:
            return self.served_model_name
        return BUNDLED_NAME if self.pair.target_model == BUNDLED else Path(self.pair.target_model).name


def group_config(config: AppConfig) -> GroupConfig:
    """Return what one speculation group is built from."""
    pair = config.pair
    names = {setting.name for setting in fields(GroupConfig)} & AppConfig.model_fields.keys()
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    draft, engine = settle_drafting(pair)
    return GroupConfig(
        target=pair.target,
        draft=draft,
        engine=engine,
        target_label_selector=config.label_selector.target,
        draft_label_selector=config.label_selector.draft,
        **settings,
    )


def api_keys(config: AppConfig) -> tuple[str, ...]:
    """Return every key that opens the API: configured, from the file, from the environment.

    Raises:
        ArgumentError: the key file cannot be read, or holds no key.
    """
    keys = [key.get_secret_value() for key in config.api_keys]
    if config.api_key_file is not None:
        try:
            lines = config.api_key_file.read_text().split()
        except OSError as error:
            raise ArgumentError(f"api_key_file: {error}") from None
        if not lines:
            raise ArgumentError(f"api_key_file: {config.api_key_file} holds no key")
        keys += lines
    keys += os.environ.get(API_KEY_VARIABLE, "").split()
    if any(not key.isascii() or not key.isprintable() or not key for key in keys):
        raise ArgumentError("api_keys: a key is empty or holds characters that no header can carry")
    return tuple(dict.fromkeys(keys))


def _complaints(model: type[BaseModel], error: ValidationError) -> list[str]:
    names = PAIR_SETTINGS.keys() | model.model_fields.keys() - {"pair"}
    lines = []
    for detail in error.errors(include_url=False, include_context=False):
        path = detail["loc"][1:] if detail["loc"][:1] == ("pair",) else detail["loc"]
        name = ".".join(map(str, path))
        if detail["type"] == "extra_forbidden":
            lines.append(unknown_argument(name, names))
        else:
            value = "********" if path[:1] == ("api_keys",) else repr(detail["input"])
            lines.append(f"{name} is {value}: {detail['msg']}")
    return lines
