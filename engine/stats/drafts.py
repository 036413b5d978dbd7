"""Counters of drafts, as vLLM's metrics define them."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationStats:
    """Counters since the start."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_prefix_queries: int = 0
    """Tokens that were looked up in the prefix cache, when their requests were first admitted."""
    num_prefix_hits: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_rounds_by_length: Counter[tuple[int, str]] = field(default_factory=Counter)
    """By draft length and `control.plan.Reason`."""
    num_tokens_by_adapter: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Draft tokens of requests with a LoRA adapter: by its name, those that were verified, and those accepted."""

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int, adapter: str | None = None) -> None:
        if num_draft_tokens == 0:
            return
        if adapter is not None:
            self.num_tokens_by_adapter[adapter, "verified"] += num_draft_tokens
            self.num_tokens_by_adapter[adapter, "accepted"] += num_accepted_tokens
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        missing = num_draft_tokens - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos += [0] * missing
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per draft, bonus included; 1 before the first draft."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(slots=True)
class RunAheadStats:
    """Counters since the start.

    Attributes:
        hits: proposals whose draft was at least partly prepared.
        misses: proposals without a prepared draft, by reason. `token`: no draft was prepared for the committed token.
            `unprepared`: time or blocks were lacking. `stale`: the request is new, or has had more than one verdict.
        num_forwards: forward passes of run-ahead.
        num_wasted: how many of these passes were not used.
    """

    hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    num_forwards: int = 0
    num_wasted: int = 0
