"""SamplingParams: how tokens are drawn and when a text ends, with vLLM's names and ranges."""

import math
from dataclasses import dataclass, field

from engine.errors import RequestError

MAX_SEED = 2**63 - 1
_MIN_TEMPERATURE = 1e-6
"""Lower temperatures are taken as 0: they tell apart less than logits are rounded by, and would make some infinite."""
_MIN_REPETITION_PENALTY = 1e-20
"""Lower penalties are taken as this one: they have the same effect, but would make logits infinite."""


def nth_seed(first: int, index: int) -> int:
    """Return the seed of one of several texts: the first one's plus the text's index, in the range of seeds."""
    span = 2 * (MAX_SEED + 1)
    return (first + index + MAX_SEED + 1) % span - MAX_SEED - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn and when they end.

    Raises:
        RequestError: a value is out of range; the message names the field, the value and the limits.
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
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None
    fixes_draft_length: bool = False
    """Draft `num_speculative_tokens` in every round, whatever `speculation=adaptive` chooses for other requests."""
    n: int = 1
    grammar: str | None = None
    """A grammar that the text must match, made by a function of `engine.sampling.grammar`."""

    def __post_init__(self) -> None:
        """Refuse values that are out of range or contradict each other."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            if not (math.isfinite(value) and low <= value <= high):
                raise RequestError(f"{name} is {value}, allowed are {low} to {high}", name)
        if self.temperature < _MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_p <= 0:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0", "top_p")
        if self.repetition_penalty <= 0:
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0", "repetition_penalty"
            )
        if self.repetition_penalty < _MIN_REPETITION_PENALTY:
            object.__setattr__(self, "repetition_penalty", _MIN_REPETITION_PENALTY)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, max_tokens only {self.max_tokens}", "min_tokens")
        for token_id, bias in self.logit_bias.items():
            if not (math.isfinite(bias) and -100 <= bias <= 100):
                raise RequestError(f"logit_bias of token {token_id} is {bias}, allowed are -100 to 100", "logit_bias")
        if self.fixes_draft_length and self.num_speculative_tokens is None:
            raise RequestError("a fixed draft length needs num_speculative_tokens", "num_speculative_tokens")
        if "" in self.stop:
            raise RequestError("stop contains an empty string", "stop")
        if self.grammar is not None and self.min_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}; it cannot be combined with a grammar", "min_tokens")
        if self.grammar is not None and self.ignore_eos:
            raise RequestError("ignore_eos cannot be combined with a grammar", "ignore_eos")

    @property
    def depends_on_path(self) -> bool:
        """Whether the draft tokens before a row change its distribution."""
        return self.has_penalties or self.grammar is not None

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty depends on which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", -(2**63), MAX_SEED),
    ("min_tokens", 0, 2**31 - 1),
    ("max_tokens", 1, 2**31 - 1),
    ("logprobs", 0, 20),
    ("prompt_logprobs", 0, 20),
    ("num_speculative_tokens", 0, 64),
    ("n", 1, 128),
)
