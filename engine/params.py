"""SamplingParams: how tokens are drawn and when a text ends, with vLLM's names and ranges."""

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from engine.errors import RequestError

MAX_SEED = 2**63 - 1
_MIN_TEMPERATURE, _MIN_REPETITION_PENALTY = 1e-6, 1e-20
"""Lower temperatures count as 0, and lower penalties as this minimum: they would make logits infinite."""


def nth_seed(first: int, index: int) -> int:
    """Return the seed of text number `index`: `first + index`, wrapped to the range of seeds."""
    span = 2 * (MAX_SEED + 1)
    return (first + index + MAX_SEED + 1) % span - MAX_SEED - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn and when they end.

    None stands for a field's default; for `max_tokens`, it means no limit but the context. `stop` may be a string.

    Raises:
        RequestError: a value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    mark_token_ids: list[int] = field(default_factory=list)
    """Delimiters of parts of the text: shown even if they are special, and not searched for stop strings."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None
    fixes_draft_length: bool = False
    """Draft `num_speculative_tokens` in every round, whatever `speculation=adaptive` chooses for other requests."""
    traces_rounds: bool = False
    """Add a `RoundTrace` to each output."""
    audits: bool = False
    """The text is the predicted output, and the outputs say where the target would have written another token."""
    n: int = 1
    grammar: str | None = None
    """The text must match this grammar, made by a function of `engine.sampling.grammar`."""
    adapter: str | None = None
    """The LoRA adapter with which the target writes; drafts are made without it."""
    learning_group: str | None = None
    """The requests with which a draft that learns judges this text; None: it never learns from it."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            object.__setattr__(self, setting.name, _checked(setting, getattr(self, setting.name)))
        for name in ("top_p", "repetition_penalty"):
            if (value := getattr(self, name)) <= 0:
                raise RequestError(f"{name} is {value}; it must be above 0", name)
        if self.temperature < _MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.repetition_penalty < _MIN_REPETITION_PENALTY:
            object.__setattr__(self, "repetition_penalty", _MIN_REPETITION_PENALTY)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, max_tokens only {self.max_tokens}", "min_tokens")
        if self.fixes_draft_length and self.num_speculative_tokens is None:
            raise RequestError("a fixed draft length needs num_speculative_tokens", "num_speculative_tokens")
        if "" in self.stop:
            raise RequestError("stop contains an empty string", "stop")
        for name in ("min_tokens", "ignore_eos"):
            if self.grammar is not None and (value := getattr(self, name)):
                raise RequestError(f"{name} is {value}; it cannot be combined with a grammar", name)

    @property
    def depends_on_path(self) -> bool:
        """Whether earlier draft tokens change a row's distribution in other ways than through its logits."""
        return self.has_penalties or self.grammar is not None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(2**63), MAX_SEED),
    "min_tokens": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "num_speculative_tokens": (0, 64),
    "n": (1, 128),
}


def _checked(setting: Any, value: Any) -> Any:
    name, default = setting.name, setting.default
    if value is None and name == "max_tokens":
        return 2**31 - 1
    if default is MISSING:
        default = setting.default_factory()
    if value is None:
        return default
    kind = type(default)
    if name in _RANGES:
        low, high = _RANGES[name]
        kind, allowed = (float, f"{low} to {high}") if kind is float else (int, f"whole numbers from {low} to {high}")
        if are_numbers([value], kind) and low <= value <= high:
            return kind(value)
    elif name == "stop":
        allowed = "a text and a list of texts"
        texts = value if not isinstance(value, str) else [value] if value else []
        if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
            return [*texts]
    elif kind is list:
        allowed = "lists of token ids"
        if isinstance(value, list | tuple) and are_numbers(value):
            return [*map(int, value)]
    elif kind is dict:
        allowed = "numbers from -100 to 100, by token id"
        biases: Any = value.values() if isinstance(value, dict) and are_numbers(value) else [None]
        if are_numbers(biases, float) and all(-100 <= bias <= 100 for bias in biases):
            return {int(token_id): float(bias) for token_id, bias in value.items()}
    else:
        allowed = "True and False" if kind is bool else "texts"
        if isinstance(value, bool if kind is bool else str):
            return value
    raise RequestError(f"{name} is {value!r:.80}, allowed are {allowed}", name)


def are_numbers(values: Iterable[Any], kind: type = int) -> bool:
    """Return whether all values are numbers, integers if `kind` is int; booleans are not numbers."""
    number = Integral if kind is int else Real
    return all(isinstance(value, number) and not isinstance(value, bool) for value in values)
