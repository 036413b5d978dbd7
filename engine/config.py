"""Every setting of the engine and its two models, written once: names, defaults, bounds, meanings.

`LLM(...)` and `serve run` take the fields of `PairConfig` as arguments. The engine gets its parts: two `ModelConfig`s
and an `EngineConfig`. They are plain dataclasses because the engine also runs where pydantic is not installed; in
`deployments/config.py` pydantic reads their types and bounds.
"""

import difflib
import importlib
import operator
import os
import re
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from engine.errors import ConfigError

BUNDLED = "bundled"
BUNDLED_TARGET = Path(__file__).parent / "pair" / "target"
BUNDLED_DRAFT = Path(__file__).parent / "pair" / "draft"
BUNDLED_HEAD = Path(__file__).parent / "pair" / "head"
_BUNDLED = {BUNDLED: str(BUNDLED_TARGET), "bundled-head": str(BUNDLED_HEAD)}

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "fp8"]
Compile = Literal["auto", "off"]
Quantization = Literal["none", "int8", "int4", "fp8"]
HeadDrafting = Literal["head", "head_tree", "head_worker", "mtp"]
Drafting = Literal["auto", "none", "model", "tree", "self", HeadDrafting, "ngram", "suffix", "model+suffix"]
Verification = Literal["coupled", "rejection", "block", "k_sequential"]
SEEDED_RULES = frozenset({"coupled"})
"""The rules by which target, request and seed alone determine a text."""
ImportPath = str
"""`package.module:NAME`: what a setting names by where it is imported from."""
Speculation = Literal["adaptive", "fixed", "off"]

TREE_WIDTH = 3
"""The value of `tree_width` if it is not set."""
_BOUNDS = {"ge": (operator.ge, "at least"), "gt": (operator.gt, "more than"), "le": (operator.le, "at most")}
"""The bounds a field's metadata can give; their keys are pydantic's."""


class _Settings:
    """A dataclass that refuses values outside the types and bounds of its fields."""

    def __post_init__(self) -> None:
        for setting in fields(self):  # type: ignore[arg-type]
            value = getattr(self, setting.name)
            if (requirement := _broken_requirement(setting, value)) is not None:
                raise ConfigError(f"{setting.name} is {value!r}; it must be {requirement}")


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_Settings):
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
    num_threads: int | None = field(default=None, metadata={"ge": 1})
    """CPU threads of a forward pass, at most; none is the cores that a worker's placement gives it."""


@dataclass(frozen=True)
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
    head_only: bool = field(default=False, kw_only=True)
    """Whether only the head is loaded, and of the model what the head shares with it."""
    compile: Compile = field(default="off", kw_only=True)
    """off, unlike for a pair: a model loaded by itself (by training, by the compiler) must not start a compiler."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(_Settings):
    """Bounds of the batch, the cache and the draft."""

    num_speculative_tokens: int = field(default=4, metadata={"ge": 0, "le": 64})
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
    tree_width: int | None = field(default=None, metadata={"ge": 1, "le": 8})
    """Most alternatives after one token with drafting=tree, or the number of chains with k_sequential; none is 3."""
    self_draft_layers: int | None = field(default=None, metadata={"ge": 1})
    """How many of the target's first layers drafting=self drafts with, followed by the target's head; fewer than it
    has."""
    verification: Verification | ImportPath = "coupled"
    """The verification rule: coupled (shared noise, token ids only), rejection (Leviathan et al.; trees as in Sequoia),
    block (Sun et al.: a chain as a whole), k_sequential (SpecTr: several chains; needs drafting=tree) or your own
    package.module:RULE."""
    max_num_seqs: int = field(default=32, metadata={"ge": 1})
    """Requests in one round, at most."""
    max_num_batched_tokens: int = field(default=1024, metadata={"ge": 1})
    """Tokens of one target forward pass, at most; prefill chunks and drafts count together."""
    max_queued_requests: int = field(default=256, metadata={"ge": 1})
    """Requests that may wait in one replica before new ones are refused (HTTP 429)."""
    max_model_len: int | None = field(default=None, metadata={"ge": 2})
    """Context length; none takes the target's own, scaled as its config.json says, and a longer one is refused."""
    block_size: int = field(default=16, metadata={"ge": 1})
    """Tokens in one KV block."""
    num_blocks: int | None = field(default=None, metadata={"ge": 1})
    """KV blocks; none sizes them from memory_fraction."""
    num_states: int | None = field(default=None, metadata={"ge": 1})
    """State slots of a model with linear layers: one for each running request, the others cache states of prefixes.
    None is 2 max_num_seqs + 4, or what half of the memory for KV blocks holds."""
    memory_fraction: float | None = field(default=None, metadata={"gt": 0, "le": 1})
    """Fraction of the device memory left after weights and workspace that KV blocks may take; none is 0.9 on GPUs and
    0.5 on CPUs; on a CPU, `LLM(...)` by default takes no more than 256 tokens for each of max_num_seqs, or one context
    of full length. KV blocks never take more than max_num_seqs contexts of full length need."""
    enable_prefix_caching: bool = True
    """Whether requests share the KV blocks of equal prefixes and, with drafting suffix, earlier outputs; only requests
    of the same cache_salt and API key do."""

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of a draft that is no copy: 0 if speculation is off."""
        return 0 if self.speculation == "off" else self.num_speculative_tokens


@dataclass(frozen=True, kw_only=True)
class PairConfig(EngineConfig, ModelSettings):
    """A target, its draft and their engine: every argument of `LLM(...)`; `serve run` has more."""

    target_model: str = "auto"
    """The model whose text is served: a directory, a GGUF file, a hub name in the local cache (`name@revision` pins a
    revision), `bundled`, or `auto`: the target that draft_model names if it is a trained head, else the bundled one."""
    draft_model: str = "auto"
    """The draft model or trained head: a directory or hub name, `bundled-head`, `none`, or `auto`: the bundled draft
    for the bundled target, else none."""
    target_quantization: Quantization = "none"
    """What the weights of the target's linear layers are rounded to at load, by torchao: none; int8 or fp8 with a
    scale for each output; int4 with one for each 32 inputs. The text is that of the rounded model. A model that is
    saved quantised needs none."""
    draft_quantization: Quantization = "none"
    """The same for the draft."""

    @property
    def target(self) -> ModelConfig:
        """The model whose text is served."""
        return self._model(BUNDLED if self.target_model == "auto" else self.target_model, self.target_quantization)

    @property
    def draft(self) -> ModelConfig | None:
        """The draft model, if there is one; whether it is loaded is for the drafting method to say."""
        path = self.draft_model
        if path == "auto":
            path = str(BUNDLED_DRAFT) if self.target_model in (BUNDLED, "auto") else "none"
        if path == "none":
            return None
        return self._model(path, self.draft_quantization)

    @property
    def engine(self) -> EngineConfig:
        """The engine's own settings."""
        return EngineConfig(**_select(EngineConfig, self))

    def _model(self, path: str, quantization: Quantization) -> ModelConfig:
        return ModelConfig(
            *split_revision(_BUNDLED.get(path, path)), quantization=quantization, **_select(ModelSettings, self)
        )


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
    start_id: int | None = None
    """The token that starts a text; None where the text continues its prompt."""
    digest: str = ""
    """Differs if the model's settings, its weights or torch do."""
    state_chunk: int = 0
    """The chunk length of the model's linear layers; 0 for a model without a state."""


class CompileProgress(NamedTuple):
    """How far the compiling of passes is: packages made, of all, and the seconds left by an estimate."""

    done: int
    of: int
    left_s: float


PAIR_SETTINGS = {setting.name: setting for setting in fields(PairConfig)}
"""Every keyword that `LLM(...)` and `serve run` share."""


def make_pair(**settings: Any) -> PairConfig:
    """Return the pair with these settings, defaults for the rest.

    Raises:
        ConfigError: a setting that does not exist, or a value that does not fit; one line that names it.
    """
    for name, value in settings.items():
        if name not in PAIR_SETTINGS:
            raise ConfigError(unknown_argument(name, PAIR_SETTINGS))
        if isinstance(value, Path):
            settings[name] = str(value)
    return PairConfig(**settings)


def import_named(setting: str, path: ImportPath) -> Any:
    """Return what a setting names as `package.module:NAME`; raise ConfigError if it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(f"{setting} is {path!r}, which cannot be imported: {error}") from error


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """Return the message that refuses an argument, with the known name closest to it."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"unknown argument {name}" + (f"; did you mean {close[0]}?" if close else "")


def _select(settings: type[EngineConfig] | type[ModelSettings], pair: PairConfig) -> dict[str, Any]:
    return {setting.name: getattr(pair, setting.name) for setting in fields(settings)}


def _broken_requirement(setting: "Field[Any]", value: Any) -> str | None:
    alternatives = get_args(setting.type)
    if get_origin(setting.type) is Literal:
        return None if value in alternatives else " or ".join(alternatives)
    if alternatives and get_origin(alternatives[0]) is Literal:  # names, or an import path
        names = get_args(alternatives[0])
        is_valid = value in names or re.fullmatch(r"[\w.]+:\w+", str(value))
        return None if is_valid else " or ".join([*names, "package.module:NAME"])
    types = [get_origin(option) or option for option in alternatives or (setting.type,)]
    if type(value) not in types and not (float in types and type(value) is int):
        return " or ".join("None" if option is type(None) else option.__name__ for option in types)
    for bound, limit in setting.metadata.items():
        holds, words = _BOUNDS[bound]
        if value is not None and not holds(value, limit):
            return f"{words} {limit}"
    return None
