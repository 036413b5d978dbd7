"""Choice: what one sequence of a response has become, round by round; and the figures over all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.openai.bodies import FinishReason, PromptTokensDetails, RequestMetrics, SpeculationMetrics, Usage
from engine.protocols import TokenLogprobs
from engine.sequence import RequestOutput


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
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def append(self, output: RequestOutput) -> None:
        """Add a round."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.num_cached_tokens = output.num_cached_tokens
        if output.num_draft_tokens:
            self.drafted.append(output.num_draft_tokens)
            self.accepted.append(output.num_accepted_tokens)


def usage(choices: Sequence[Choice], n: int) -> Usage:
    """Return the token counts; a prompt counts once, however many choices it has."""
    prompt_tokens = sum(len(choice.prompt_token_ids) for choice in choices[::n])
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(c.num_cached_tokens for c in choices[::n])),
    )


def speculation_metrics(choices: Sequence[Choice], level: str, num_spec_tokens: int) -> RequestMetrics:
    """Return one choice's acceptance in vLLM's format; null for several choices, as there."""
    if len(choices) != 1:
        return RequestMetrics(speculative_decoding=None)
    drafted, accepted = choices[0].drafted, choices[0].accepted
    steps = len(drafted)
    histogram = [accepted.count(count) for count in range(num_spec_tokens + 1)]
    figures = SpeculationMetrics(
        mean_acceptance_length=1 + sum(accepted) / steps if steps else 1.0,
        draft_acceptance_rate=sum(accepted) / sum(drafted) if steps else 0.0,
        acceptance_histogram=histogram,
        num_spec_steps=steps,
        num_accepted_draft_tokens=sum(accepted),
        num_draft_tokens=sum(drafted),
        num_spec_tokens=num_spec_tokens,
    )
    if level == "detailed":
        figures = figures.model_copy(update={"per_step_accepted": accepted, "per_step_drafted": drafted})
    return RequestMetrics(speculative_decoding=figures)
