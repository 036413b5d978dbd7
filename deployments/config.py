"""AppConfig: everything an operator may set, with defaults for a laptop.

`serve run deployments:app name=value ...` passes flat strings; a Serve config file passes typed, nested `args:`.
Both end here, and a wrong name or value is refused in one line. The only environment variable of the package is
read here.
"""

import difflib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import click
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator

from cluster.config import GroupConfig, RunAhead
from engine.config import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    Compile,
    Device,
    Drafting,
    Dtype,
    EngineConfig,
    ModelConfig,
    Speculation,
    Verification,
)
from engine.drafting.registry import Method, choose_method

API_KEY_VARIABLE = "PACELINE_API_KEY"
BUNDLED = "bundled"
BUNDLED_NAME = "paceline"


class ArgumentError(click.UsageError):
    """An application argument that does not exist or does not fit; one line on the command line."""


def _none_from_text(value: object) -> object:
    """Let the command line, which has strings only, say `none`."""
    return None if isinstance(value, str) and value.lower() == "none" else value


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
    max_prompts: int = Field(64, ge=1)
    """Prompts in one completion request."""
    max_messages: int = Field(1024, ge=1)
    """Messages in one chat request."""
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
    max_logit_bias: int = Field(300, ge=1)
    """Tokens with a bias."""
    max_grammar_chars: int = Field(2**16, ge=1)
    """Characters of a JSON schema, a regular expression, a grammar, or of all choices together."""
    grammar_timeout_s: float = Field(1.0, gt=0)
    """Seconds that compiling one of these may take."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Seconds from a request's arrival to its last token."""


class Autoscaling(BaseModel):
    """How many Router replicas, each with its own speculation group, and when to have more."""

    model_config = FROZEN

    min_replicas: int = Field(1, ge=1)
    """Replicas that are always there."""
    max_replicas: int = Field(1, ge=1)
    """Replicas at most; above min_replicas, their number follows the queue depth."""
    requests_per_replica: int = Field(24, ge=1)
    """Requests, waiting and running, that one replica should have."""
    upscale_delay_s: float = Field(30.0, ge=0)
    """Seconds of pressure before replicas are added."""
    downscale_delay_s: float = Field(600.0, ge=0)
    """Seconds of calm before replicas are removed."""


class AppConfig(BaseModel):
    """The application's settings."""

    model_config = FROZEN

    target_model: str = BUNDLED
    """The model whose text is served: a directory, a hub name in the local cache, or `bundled`."""
    draft_model: str = "auto"
    """The model that proposes; `none` is plain decoding, `auto` the bundled draft for the bundled target, else none."""
    served_model_name: Annotated[str | None, OrNone] = None
    """What clients call the model; none takes the last part of target_model."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Target ranks that share the target's weights."""
    dtype: Dtype = "auto"
    """Number format of both models; auto is bfloat16 on CUDA and on CPUs with AMX, else float32."""
    device: Device = "auto"
    """Where both models run; auto is cuda where there is one."""
    compile: Compile = "auto"
    """auto: on a CPU, passes run compiled as soon as a process in the background has done so; off: never."""
    num_threads: Annotated[int | None, OrNone] = Field(None, ge=1)
    """CPU threads of one model's forward pass; none tries what pays, up to the cores that it has."""
    target_revision: Annotated[str | None, OrNone] = None
    """Hub revision of the target."""
    draft_revision: Annotated[str | None, OrNone] = None
    """Hub revision of the draft."""
    run_ahead: RunAhead = "auto"
    """Whether the draft drafts for the likeliest verdicts while the target verifies: auto, on or off. auto is on where
    both have devices or cores of their own."""
    pinning: Literal["on", "off"] = "off"
    """on: Router, draft and target keep to one core for what one thread computes, and leave the others to HTTP; for one
    group alone on two cores."""
    num_speculative_tokens: int = Field(4, ge=0, le=64)
    """Draft tokens per round at most; 0 is plain decoding."""
    speculation: Speculation = "adaptive"
    """adaptive: as many draft tokens as measured goodput says, none included; fixed: always all; off: no draft."""
    drafting: Drafting = "auto"
    """Who drafts: model is the draft model; none is nobody, and no draft model is loaded; auto is model where there is
    a draft model, else none."""
    verification: Verification = "coupled"
    """The verification rule: coupled (shared noise) or rejection (Leviathan et al.)."""
    max_num_seqs: int = Field(32, ge=1)
    """Requests that share a round."""
    max_num_batched_tokens: int = Field(1024, ge=1)
    """Tokens of one target forward pass."""
    max_queued_requests: int = Field(256, ge=1)
    """Requests that may wait in one replica before new ones get 429."""
    max_model_len: Annotated[int | None, OrNone] = Field(None, ge=2)
    """Context length; none takes the target's own."""
    block_size: int = Field(16, ge=1)
    """Tokens in one KV block."""
    num_blocks: Annotated[int | None, OrNone] = Field(None, ge=1)
    """KV blocks; none sizes them from memory_fraction."""
    memory_fraction: float = Field(0.5, gt=0, le=1)
    """Share of the memory that is free after loading which KV blocks may take."""
    enable_prefix_caching: bool = True
    """Whether requests share the KV blocks of equal prefixes."""
    stream_interval_s: float = Field(0.02, ge=0)
    """Seconds for which a stream gathers tokens after a chunk, but for its last ones; 0 sends every round's."""
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    """Acceptance figures in every response, in vLLM's format; a request can ask for its own by
    `speculative.metrics`.
    """
    max_recoveries: int = Field(3, ge=0)
    """Target restarts in a row, without a finished round between them, before clients get an error."""
    round_timeout_s: float = Field(120.0, gt=0)
    """Seconds without a finished round, while there is work, after which a replica counts as unhealthy."""
    drain_timeout_s: float = Field(300.0, gt=0)
    """Seconds that running streams may take to finish at shutdown or scale-down."""
    api_keys: tuple[SecretStr, ...] = ()
    """Keys of which clients must send one; also read from the variable PACELINE_API_KEY. None: open to all."""
    api_key_file: Annotated[Path | None, OrNone] = None
    """A file with more keys, one per line."""
    autoscaling: Annotated[Autoscaling, BeforeValidator(_object_from_text)] = Autoscaling()
    """Router replicas and when to have more."""
    limits: Annotated[Limits, BeforeValidator(_object_from_text)] = Limits()
    """What one request may ask for."""

    @model_validator(mode="after")
    def _check_pinning(self) -> Self:
        if self.pinning == "on" and (self.run_ahead == "on" or self.tensor_parallel_size > 1 or self.device == "cuda"):
            raise ValueError("pinning is on: one core cannot have run_ahead on, several target ranks or device cuda")
        return self

    @model_validator(mode="after")
    def _check_drafting(self) -> Self:
        _ = self.drafting_method
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

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        if self.served_model_name is not None:
            return self.served_model_name
        return BUNDLED_NAME if self.target_model == BUNDLED else Path(self.target_model).name

    @property
    def target_path(self) -> str:
        """The target's directory or hub name."""
        return str(BUNDLED_TARGET) if self.target_model == BUNDLED else self.target_model

    @property
    def draft_path(self) -> str | None:
        """The directory or hub name of the draft model that is loaded, if one is."""
        return self._named_draft if self.drafting_method.loads_model else None

    @property
    def drafting_method(self) -> Method:
        """How drafts are made, and where."""
        return choose_method(engine_config(self), has_draft_model=self._named_draft is not None)

    @property
    def _named_draft(self) -> str | None:
        choice = self.draft_model
        if choice == "auto":
            choice = BUNDLED if self.target_model == BUNDLED else "none"
        if choice == "none":
            return None
        return str(BUNDLED_DRAFT) if choice == BUNDLED else choice


def engine_config(config: AppConfig) -> EngineConfig:
    """Return the engine's settings as the operator chose them."""
    return EngineConfig(
        num_speculative_tokens=config.num_speculative_tokens,
        speculation=config.speculation,
        drafting=config.drafting,
        verification=config.verification,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_queued_requests=config.max_queued_requests,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        memory_fraction=config.memory_fraction,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def group_config(config: AppConfig) -> GroupConfig:
    """Return what one speculation group is built from."""
    draft_path, engine = config.draft_path, engine_config(config)
    if not config.drafting_method.proposes:
        engine = replace(engine, num_speculative_tokens=0)
    return GroupConfig(
        target=_model_config(config, config.target_path, config.target_revision),
        draft=_model_config(config, draft_path, config.draft_revision) if draft_path else None,
        engine=engine,
        tensor_parallel_size=config.tensor_parallel_size,
        run_ahead=config.run_ahead,
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


def _model_config(config: AppConfig, path: str, revision: str | None) -> ModelConfig:
    return ModelConfig(
        path=path,
        dtype=config.dtype,
        device=config.device,
        compile=config.compile,
        revision=revision,
        num_threads=config.num_threads,
        pinned=config.pinning == "on",
    )


def _complaints(model: type[BaseModel], error: ValidationError) -> list[str]:
    lines = []
    for detail in error.errors(include_url=False, include_context=False):
        name = ".".join(str(part) for part in detail["loc"])
        if not name:  # the complaint is about several arguments together, and names them
            lines.append(detail["msg"].removeprefix("Value error, "))
        elif detail["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, model.model_fields, n=1)
            lines.append(f"unknown argument {name}" + (f"; did you mean {close[0]}?" if close else ""))
        else:
            lines.append(f"{name} is {detail['input']!r}: {detail['msg']}")
    return lines
