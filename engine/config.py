"""Every setting of the engine and its two models, written once: names, defaults, bounds, meanings.

`LLM(...)` and `serve run` take the fields of `PairConfig` as arguments.
"""

import difflib
import importlib
import json
import os
from collections.abc import Iterable
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from engine.errors import ConfigError

BUNDLED = "bundled"
BUNDLED_TARGET = Path(__file__).parent / "pair" / "target"
BUNDLED_DRAFT = Path(__file__).parent / "pair" / "draft"
BUNDLED_HEAD = Path(__file__).parent / "pair" / "head"
BUNDLED_MODELS = {BUNDLED: str(BUNDLED_TARGET), "bundled-head": str(BUNDLED_HEAD)}

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "fp8"]
Compile = Literal["auto", "off"]
Quantization = Literal["none", "int8", "int4", "fp8"]
HeadDrafting = Literal["head", "head_tree", "head_worker", "mtp"]
Drafting = Literal["auto", "none", "model", "tree", "self", HeadDrafting, "ngram", "suffix", "model+suffix"]
Verification = Literal["coupled", "rejection", "block", "k_sequential"]
SEEDED_RULES = frozenset({"coupled"})  # with these, only target, request and seed determine a text
ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
"""`package.module:NAME`, from which the value of a setting is imported."""
Speculation = Literal["adaptive", "fixed", "off"]
Execution = Literal["torch", "vllm"]
VllmArguments = Annotated[
    dict[str, Any], BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value)
]

TREE_WIDTH = 3
"""Most alternatives after a token of a drafted tree; with k_sequential, the number of chains."""
VLLM_BLOCK_SIZE = 32
"""Tokens in a KV block with vLLM, unless its arguments say otherwise; CPUs need a multiple of 32, most GPUs of 16."""
SETTINGS = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class ModelSettings:
    """How a model is held in memory and computed."""

    dtype: Dtype = "auto"
    """Number format of the weights; auto is bfloat16 on CUDA, float32 on CPUs, where 16-bit texts depend on batches."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Number format of keys and values in the KV cache; auto is dtype, and fp8 takes half of 16 bits. The text is that
    of the target with these keys and values."""
    device: Device = "auto"
    """Where models run: auto, cpu or cuda; auto is cuda where there is one, else cpu."""
    compile: Compile = "auto"
    """auto: on a CPU, passes run compiled as soon as a background process has compiled them; on a GPU, layers are
    compiled and CUDA graphs recorded at start; off: neither."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of a forward pass, at most; none is the cores that a worker's placement gives it."""


@dataclass(frozen=True, config=SETTINGS)
class ModelConfig(ModelSettings):
    """One model, and how it is held in memory and computed."""

    path: str
    """A transformers directory, or a hub name that is already in the local cache."""
    revision: str | None = None
    """A hub revision to pin."""
    quantization: Quantization = field(default="none", kw_only=True)
    """What linear layers are rounded to as the model loads."""
    head: str | None = field(default=None, kw_only=True)
    """A trained head that is loaded with the model and drafts in its process: a directory or hub name; the model's own
    path for the layers that its checkpoint has for it."""
    others: tuple[str, ...] = field(default=(), kw_only=True)
    """Further drafts that are loaded with this draft, and draft where they are accepted more: directories or hub names.
    """
    head_only: bool = field(default=False, kw_only=True)
    """Whether only the head is loaded, and of the model what the head shares with it."""
    compile: Compile = field(default="off", kw_only=True)
    """off, unlike for a pair: a model loaded by itself (by training, by the compiler) must not start a compiler."""
    execution: Execution = field(default="torch", kw_only=True)
    """What computes its passes."""
    vllm: VllmArguments = field(default_factory=dict, kw_only=True, hash=False)
    """vLLM's arguments beside those that the other settings decide."""


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class EngineSettings:
    """Bounds of the batch, the cache and the draft."""

    num_speculative_tokens: int = Field(default=4, ge=0, le=64)
    """Draft tokens per round at most (k); 0 is plain decoding."""
    speculation: Speculation = "adaptive"
    """adaptive: per request the length, from 0 to k, that raises measured goodput; fixed: always k; off: no drafts."""
    drafting: Drafting | ImportPath = "auto"
    """The drafting method. model: the draft model drafts; tree: it drafts the likeliest alternatives, too; head: a
    trained head drafts in the target's process; head_tree: it drafts trees there; head_worker: it drafts on the draft
    worker; mtp: the MTP layer of the target's checkpoint drafts; self: the target drafts with its first layers; ngram:
    what followed the last tokens earlier in the request; suffix: the same by frequency, and in earlier outputs too;
    model+suffix: for each request in each round, the one that promises more; none: no drafts; auto: model or head, as
    draft_model is one, else suffix; package.module:Class: your own."""
    self_draft_layers: int | None = Field(default=None, ge=1)
    """How many of the target's first layers drafting=self drafts with, followed by the target's head; fewer than it
    has."""
    verification: Verification | ImportPath = "coupled"
    """The verification rule: coupled (shared noise, token ids only), rejection (Leviathan et al.; trees as in Sequoia),
    block (Sun et al.: a chain as a whole), k_sequential (SpecTr: several chains; needs drafting=tree) or your own
    package.module:RULE."""
    max_num_seqs: int = Field(default=32, ge=1)
    """Requests in one round, at most."""
    max_num_batched_tokens: int = Field(default=1024, ge=1)
    """Tokens of one target forward pass, at most; prefill chunks and drafts count together."""
    max_queued_requests: int = Field(default=256, ge=1)
    """Requests that may wait in one replica before new ones are refused (HTTP 429)."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Context length; none takes the target's own, scaled as its config.json says, and a longer one is refused."""
    num_blocks: int | None = Field(default=None, ge=1)
    """KV blocks; none sizes them from memory_fraction."""
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the device memory left after weights and workspace that KV blocks may take; none is 0.9 on GPUs and
    0.5 on CPUs; on a CPU, `LLM(...)` by default takes no more than 256 tokens for each of max_num_seqs, or one context
    of full length. KV blocks never take more than max_num_seqs contexts of full length need."""
    enable_prefix_caching: bool = True
    """Whether requests share the KV blocks of equal prefixes and, with drafting suffix, earlier outputs; only requests
    of the same cache_salt and API key do."""

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of a draft that is not copied from a text; 0 if speculation is off."""
        return 0 if self.speculation == "off" else self.num_speculative_tokens


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class EngineConfig(EngineSettings):
    """The engine's settings, and what follows from the models."""

    block_size: int = Field(default=16, ge=1)
    """Tokens in one KV block."""
    num_states: int | None = Field(default=None, ge=1)
    """State slots of a model with linear layers: one for each running request, the others cache states of prefixes.
    None is 2 max_num_seqs + 4, or what half of the memory for KV blocks holds."""
    num_drafts: int = Field(default=1, ge=1)
    """Draft models that are loaded, one of which drafts for a request in a round."""

    @property
    def wanted_states(self) -> int:
        """State slots to allocate if there is memory for them: `num_states`, or its default."""
        return self.num_states or 2 * self.max_num_seqs + 4


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class PairConfig(EngineSettings, ModelSettings):
    """A target, its draft and their engine: every argument of `LLM(...)`; `serve run` has more."""

    target_model: str = "auto"
    """The model whose text is served: a directory, a GGUF file, a hub name in the local cache (`name@revision` pins a
    revision), `bundled`, or `auto`: the target that draft_model names if it is a trained head, else the bundled one."""
    draft_model: str = "auto"
    """The draft model or trained head: a directory or hub name, `bundled-head`, `none`, or `auto`: the bundled draft
    for the bundled target, else none. Several models, separated by commas: each request gets the one of which the
    target accepts most."""
    target_quantization: Quantization = "none"
    """What the weights of the target's linear layers are rounded to at load, by torchao: none; int8 or fp8 with a
    scale for each output; int4 with one for each 32 inputs. The text is that of the rounded model. A model that is
    saved quantised needs none."""
    draft_quantization: Quantization = "none"
    """The same for the draft."""
    execution: Execution = "torch"
    """What computes the target: torch, the passes of this project; vllm, the passes of vLLM, on several GPUs and for
    families that only vLLM has. Drafts are always computed by torch."""
    vllm: VllmArguments = field(default_factory=dict)
    """Further arguments of vLLM with execution vllm: a JSON object with the names of its command line, such as
    {"enable_expert_parallel": true}; and "invariant": true, without which texts on GPUs can differ with the batch, as
    vLLM rounds."""

    @property
    def target(self) -> ModelConfig:
        """The model whose text is served."""
        model = BUNDLED if self.target_model == "auto" else self.target_model
        return self._model(model, self.target_quantization, execution=self.execution, vllm=self.vllm)

    @property
    def draft_names(self) -> list[str]:
        """The models that `draft_model` names; empty if there is none."""
        path = self.draft_model
        if path == "auto":
            path = str(BUNDLED_DRAFT) if self.target_model in (BUNDLED, "auto") else "none"
        if path == "none":
            return []
        names = [path] if os.path.exists(path) else [name.strip() for name in path.split(",")]
        if len(set(names)) < len(names) or (len(names) > 1 and {"", "auto", "none"} & {*names}):
            raise ConfigError(f"draft_model is {path!r}; several drafts must be different models, each named")
        return names

    @property
    def draft(self) -> ModelConfig | None:
        """The draft model, if any, and others beside it; the drafting method decides whether they are loaded."""
        first, *others = self.draft_names or [""]
        others = [BUNDLED_MODELS.get(name, name) for name in others]
        return self._model(first, self.draft_quantization, others=tuple(others)) if first else None

    @property
    def engine(self) -> EngineConfig:
        """The engine's own settings."""
        sizes = {"block_size": self.vllm.get("block_size", VLLM_BLOCK_SIZE)} if self.execution == "vllm" else {}
        return EngineConfig(**_select(EngineSettings, self), **sizes)

    def _model(self, path: str, quantization: Quantization, **settings: Any) -> ModelConfig:
        path, revision = split_revision(BUNDLED_MODELS.get(path, path))
        return ModelConfig(path, revision, quantization=quantization, **_select(ModelSettings, self), **settings)


def split_revision(model: str) -> tuple[str, str | None]:
    """Return the path and the revision of a setting that names a model."""
    name, at, revision = model.rpartition("@")
    return (name, revision) if at and not os.path.exists(model) else (model, None)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts about a loaded model that other code needs."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    num_parameters: int
    dtype: str
    device: str
    start_id: int | None = None  # the token that starts a text; None where the text continues its prompt
    digest: str = ""  # differs if the model's settings, its weights or torch differ
    state_chunk: int = 0  # the chunk length of the linear layers; 0 for a model without a state
    adapters: tuple[str, ...] = ()  # names of LoRA adapters


class CompileProgress(NamedTuple):
    """Progress of compiling passes: packages compiled, packages in all, estimated seconds left."""

    done: int
    of: int
    left_s: float


_SECTIONS: tuple[Any, ...] = (PairConfig, EngineSettings, ModelSettings)
PAIR_SETTINGS: dict[str, FieldInfo] = {
    name: section.__pydantic_fields__[name] for section in _SECTIONS for name in section.__annotations__
}
"""Every keyword that `LLM(...)` and `serve run` share."""


def make_pair(**settings: Any) -> PairConfig:
    """Return the pair with these settings; raise ConfigError with a line that names each wrong setting."""
    paths = {name: str(value) for name, value in settings.items() if isinstance(value, Path)}
    try:
        return PairConfig(**settings | paths)
    except ValidationError as error:
        raise ConfigError(complaint(error, PAIR_SETTINGS)) from None


def import_named(setting: str, path: ImportPath) -> Any:
    """Import the object that a setting names as `package.module:NAME`; raise ConfigError if that fails."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(f"{setting} is {path!r}, which cannot be imported: {error}") from error


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """Return the message that refuses an argument, with the known name closest to it."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"unknown argument {name}" + (f"; did you mean {close[0]}?" if close else "")


def complaint(error: ValidationError, known: Iterable[str]) -> str:
    """Return pydantic's errors about settings in one line that names each; API keys are not shown."""
    problems: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False, include_context=False):
        path = [str(key) for key in detail["loc"] if key != "pair"]
        name = path[0] if path and path[0] in PAIR_SETTINGS else ".".join(path)  # without the branch of a union
        if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            problems[unknown_argument(name, known)] = []
        else:
            value = "********" if path[:1] == ["api_keys"] else repr(detail["input"])
            problems.setdefault(f"{name} is {value}", []).append(detail["msg"])
    return "; ".join(": ".join(filter(None, (what, " or ".join(why)))) for what, why in problems.items())


def _select(settings: type[EngineSettings] | type[ModelSettings], pair: PairConfig) -> dict[str, Any]:
    return {setting.name: getattr(pair, setting.name) for setting in fields(settings)}
