"""Choice: the text and statistics of one sequence so far; token counts and acceptance of a whole response."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from deployments.openai.fields import ResponseModel
from engine.protocols import TokenLogprobs
from engine.sequence import RequestOutput

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(ResponseModel):
    """How many of the prompt's tokens were cached."""

    cached_tokens: int


class Usage(ResponseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculationMetrics(ResponseModel):
    """Acceptance of one sequence's drafts, in vLLM's wire format."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class RequestMetrics(ResponseModel):
    """Figures about one request; null speculation for more than one choice."""

    speculative_decoding: SpeculationMetrics | None


@dataclass(slots=True)
class Choice:
    """One sequence so far."""

    index: int
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_logprob_chars: int = 0
    num_drafted: list[int] = field(default_factory=list)
    """Draft tokens of each round that had any."""
    num_accepted: list[int] = field(default_factory=list)
    """How many of them were accepted."""

    def append(self, output: RequestOutput) -> None:
        """Add a round."""
        if not self.token_ids:  # a Router that goes on with the text has cached other tokens
            self.num_cached_tokens = output.num_cached_tokens
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if output.num_draft_tokens:
            self.num_drafted.append(output.num_draft_tokens)
            self.num_accepted.append(output.num_accepted_tokens)


def usage(choices: Sequence[Choice], n: int) -> Usage:
    """Return the token counts; a prompt counts once, however many choices it has."""
    prompt_tokens = sum(len(choice.prompt_token_ids) for choice in choices[::n])
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    cached_tokens = sum(choice.num_cached_tokens for choice in choices[::n])
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def speculation_metrics(choices: Sequence[Choice], level: str, num_spec_tokens: int) -> RequestMetrics:
    """Return one choice's acceptance in vLLM's format; null for several choices, as vLLM does."""
    if len(choices) != 1:
        return RequestMetrics(speculative_decoding=None)
    drafted, accepted = choices[0].num_drafted, choices[0].num_accepted
    steps = len(drafted)
    metrics = SpeculationMetrics(
        mean_acceptance_length=1 + sum(accepted) / steps if steps else 1.0,
        draft_acceptance_rate=sum(accepted) / sum(drafted) if steps else 0.0,
        acceptance_histogram=[accepted.count(count) for count in range(num_spec_tokens + 1)],
        num_spec_steps=steps,
        num_accepted_draft_tokens=sum(accepted),
        num_draft_tokens=sum(drafted),
        num_spec_tokens=num_spec_tokens,
    )
    if level == "detailed":
        metrics = metrics.model_copy(update={"per_step_accepted": accepted, "per_step_drafted": drafted})
    return RequestMetrics(speculative_decoding=metrics)
