"""Record: what a client saw of one request, the latencies that follow from it, and whether they keep an SLO."""

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from operator import add, sub
from typing import Any, Literal

OK, REJECTED = "ok", "429"
LatencyName = Literal["ttft", "tpot", "itl", "e2e"]
LATENCIES: tuple[LatencyName, ...] = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of draft tokens, as vLLM counts them; empty drafts do not count."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(*map(sub, astuple(self), astuple(other)))

    @property
    def rate(self) -> float | None:
        """Accepted over drafted tokens; None without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_length(self) -> float | None:
        """Committed tokens of a round with a draft, the bonus token included; None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


@dataclass(slots=True)
class Record:
    """One request. All times are seconds since the run began.

    Attributes:
        index: the request's number, which decides its prompt and seed; equal in all arms and turns.
        scheduled_s: when the request was due. Latencies count from here, so a request that the client sent late because
            the server was slow is not counted as fast (coordinated omission). In a closed loop it is `sent_s`.
        outcome: `ok`, `429`, another HTTP status, or a word for what failed: `timeout`, `ConnectError`, `cut`, ...
        chunks: times at which tokens arrived, and the tokens received by then; 0 where the server does not say.
        acceptance: None if the server does not report it per request.
        kept: the server's own record of its answer, with the text that came here, for `paceline audit`.
        difference: from the reference's text, in words.
    """

    index: int
    domain: str
    scheduled_s: float
    sent_s: float
    arm: str = ""
    turn: int = 0
    outcome: str = OK
    message: str = ""
    retry_after_s: float | None = None
    end_s: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    acceptance: Acceptance | None = None
    has_thoughts: bool = False
    kept: dict[str, Any] | None = None
    difference: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.outcome == OK

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, from when the request was due."""
        return self.chunks[0][0] - self.scheduled_s if self.chunks else None

    @property
    def e2e_s(self) -> float | None:
        """Time to the last token, from when the request was due."""
        return self.chunks[-1][0] - self.scheduled_s if self.chunks else None

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1); None for a single token."""
        return (self.chunks[-1][0] - self.chunks[0][0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Time between tokens: the time between two arrivals, divided among the tokens of the second.

        Empty if the server does not say how many tokens a chunk has: the time between chunks would rise with the
        acceptance of drafts.
        """
        gaps: list[float] = []
        for (before_s, num_before), (after_s, num_after) in zip(self.chunks, self.chunks[1:], strict=False):
            if count := num_after - num_before:
                gaps += [(after_s - before_s) / count] * count
        return gaps

    def latencies_s(self, name: LatencyName) -> list[float]:
        """Return the request's values of a latency: one, several for `itl`, or none."""
        if name == "itl":
            return self.itl_s
        value: float | None = getattr(self, f"{name}_s")
        return [] if value is None else [value]

    def as_json(self) -> dict[str, Any]:
        """Return the line of `requests.jsonl`."""
        fields = asdict(self)
        del fields["kept"], fields["retry_after_s"]
        return {**fields, "ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "e2e_s": self.e2e_s}


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds on one request's latencies; `itl` limits the longest time between two tokens."""

    limits_ms: tuple[tuple[LatencyName, float], ...]
    min_share: float

    @classmethod
    def parse(cls, text: str, min_share: float) -> "Slo":
        """Return the limits of `ttft=500,tpot=50`.

        Raises ValueError if a name is unknown, or a limit is no positive number.
        """
        limits: dict[LatencyName, float] = {}
        for part in text.split(","):
            name, _, value = part.replace(":", "=").partition("=")
            known = next((latency for latency in LATENCIES if latency == name.strip()), None)
            if known is None:
                raise ValueError(f"{name!r} is none of {', '.join(LATENCIES)}")
            limits[known] = float(value)
            if not limits[known] > 0:
                raise ValueError(f"{part!r} is not above 0 ms")
        return cls(tuple(limits.items()), min_share)

    def is_good(self, record: Record) -> bool:
        return record.is_ok and all(
            1000 * max(record.latencies_s(name), default=0.0) <= limit_ms for name, limit_ms in self.limits_ms
        )

    def share(self, records: Sequence[Record]) -> float:
        """Return the share of good requests; refused and failed ones are not good."""
        return sum(map(self.is_good, records)) / len(records) if records else 0.0

    def is_met(self, records: Sequence[Record]) -> bool:
        return bool(records) and self.share(records) >= self.min_share

    def __str__(self) -> str:
        limits = ", ".join(f"{name} <= {limit_ms:g} ms" for name, limit_ms in self.limits_ms)
        return f"{limits} for {self.min_share:.4g} of the requests"
