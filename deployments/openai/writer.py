"""Writer: turns the rounds of a request into a body or events; the base class of the writers of all three APIs."""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from deployments.openai.sampling_fields import GenerationRequest
from deployments.openai.types import ResponseModel, to_json
from engine.protocols import TokenLogprobs
from engine.requests.detokenizer import TokenBytes
from engine.requests.output import RequestOutput, RoundTrace

FinishReason = Literal["stop", "length", "tool_calls"]


PredictionCounts = dict[Literal["accepted_prediction_tokens", "rejected_prediction_tokens"], int]


class Usage(ResponseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens"], int]
    completion_tokens_details: PredictionCounts | None = None
    """Predicted tokens that were accepted as drafts, and predicted tokens that no choice has."""


class SpeculationMetrics(ResponseModel):
    """Acceptance of one sequence's drafts, in vLLM's wire format."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[int, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class RequestMetrics(ResponseModel):
    """Figures about one request; null speculation for more than one choice."""

    speculative_decoding: SpeculationMetrics | None


class Round(ResponseModel):
    """One round: the texts of its tokens, of which the first `accepted` were draft tokens, and of the whole draft.

    The last token is `recovered` (the draft differed), `bonus` (the whole draft was accepted), `plain` (there was no
    draft) or itself `accepted` (the text ended inside the draft). `parents` are the draft's, if it is a tree.
    """

    texts: list[str]
    accepted: int
    draft: list[str]
    last: Literal["recovered", "bonus", "plain", "accepted"]
    parents: list[int] | None = None


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
    num_drafted: list[int] = field(default_factory=list)  # in each round with a draft; `num_accepted` likewise
    num_accepted: list[int] = field(default_factory=list)
    traces: list[RoundTrace] = field(default_factory=list)  # of rounds that were not written yet, if rounds are traced
    num_predicted: int = 0  # accepted draft tokens that the client predicted

    def append(self, output: RequestOutput) -> None:
        if not self.token_ids:  # a Router that resumes the text has cached other tokens
            self.num_cached_tokens = output.num_cached_tokens
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        assert output.finish_reason != "error", "a Router ends such a request"
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.num_predicted += output.num_predicted_tokens
        if output.num_draft_tokens:
            self.num_drafted.append(output.num_draft_tokens)
            self.num_accepted.append(output.num_accepted_tokens)
        if output.trace is not None:
            self.traces.append(output.trace)


@dataclass(frozen=True, slots=True)
class Reply:
    """The facts about one response that all APIs share; `ingress/server_info.py` computes `fingerprint`."""

    id: str
    model: str
    fingerprint: str
    prompts: list[list[int]]
    token_bytes: TokenBytes
    num_speculative_tokens: int
    predicted_token_ids: list[int] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class Writer(ABC):
    """Writes one response, as the text of one body or of events; holds the tokens of each choice so far."""

    END: ClassVar[str] = "data: [DONE]\n\n"  # of a stream, failed or not
    REPEATS_ALL: ClassVar[bool] = False  # whether the last events repeat all earlier text

    reply: Reply
    request: GenerationRequest
    choices: list[Choice] = field(init=False)
    num_events: int = field(default=0, init=False)
    record: Callable[[], dict[str, Any]] | None = field(default=None, init=False)
    """Returns the record of the whole answer, if the client asked for it; see `deployments/records`."""

    def __post_init__(self) -> None:
        prompts = self.reply.prompts
        self.choices = [Choice(i, prompts[i // self.n]) for i in range(len(prompts) * self.n)]

    @abstractmethod
    def opening(self) -> str:
        """Return the events before the first tokens."""

    @abstractmethod
    def chunk(self, choice: Choice, output: RequestOutput) -> str:
        """Return the events for the next tokens of a choice, already appended to it."""

    @abstractmethod
    def closing(self) -> str:
        """Return the events after the last tokens."""

    @abstractmethod
    def whole(self) -> ResponseModel:
        """Return the body of a response that is not streamed."""

    def failed(self, body: dict[str, Any]) -> str:
        """Return the event of an error after the first byte; before it, `body` would be the response."""
        return event(body)

    @property
    def n(self) -> int:
        return self.request.n or 1

    def common_fields(self, object: str) -> dict[str, Any]:
        """Return the fields every body and chunk starts with."""
        reply = self.reply
        return {
            "id": reply.id,
            "object": object,
            "created": reply.created,
            "model": reply.model,
            "system_fingerprint": reply.fingerprint,
        }

    def ids_field(self, **token_ids: list[int]) -> dict[str, Any]:
        """Return a field with token ids, if the client asked for them."""
        return token_ids if self.request.return_token_ids else {}

    def rounds_field(self, choice: Choice) -> dict[str, Any]:
        """Return a field with the rounds since the last call, if the client asked for them."""
        if not (self.request.speculative and self.request.speculative.trace):
            return {}
        rounds = [_round(trace, self.reply.token_bytes) for trace in choice.traces]
        choice.traces.clear()
        return {"rounds": rounds}

    def usage(self) -> Usage:
        """Return the token counts so far; a prompt counts once, not per choice."""
        prompt_tokens = sum(len(choice.prompt_token_ids) for choice in self.choices[:: self.n])
        completion_tokens = sum(len(choice.token_ids) for choice in self.choices)
        cached_tokens = sum(choice.num_cached_tokens for choice in self.choices[:: self.n])
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details={"cached_tokens": cached_tokens},
        )

    def _prediction_details(self) -> PredictionCounts:
        predicted = Counter(self.reply.predicted_token_ids)
        return {
            "accepted_prediction_tokens": sum(choice.num_predicted for choice in self.choices),
            "rejected_prediction_tokens": sum(
                (predicted - Counter(choice.token_ids)).total() for choice in self.choices
            ),
        }

    def usage_fields(self) -> dict[str, Any]:
        """Return the final token counts and, if requested, the acceptance figures and the record."""
        level = self.request.speculative and self.request.speculative.metrics
        metrics = {} if level in (None, "none") else {"metrics": self._metrics(is_detailed=level == "detailed")}
        usage = self.usage()
        if self.request.prediction is not None:
            usage.completion_tokens_details = self._prediction_details()
        record = {} if self.record is None else {"record": self.record()}
        return {"usage": usage, **metrics, **record}

    @property
    def has_usage_chunk(self) -> bool:
        if self.record is not None:
            return True
        options = self.request.stream_options
        return options is not None and options.has_usage

    def chunk_usage_field(self) -> dict[str, Any]:
        """Return a chunk's usage: the counts so far if requested for every chunk, else null."""
        options = self.request.stream_options
        if options is None or not options.has_usage:
            return {}
        return {"usage": self.usage() if options.continuous_usage_stats else None}

    def _metrics(self, *, is_detailed: bool) -> RequestMetrics:
        if len(self.choices) != 1:  # as in vLLM
            return RequestMetrics(speculative_decoding=None)
        drafted, accepted = self.choices[0].num_drafted, self.choices[0].num_accepted
        steps, longest = len(drafted), max([self.reply.num_speculative_tokens, *drafted])
        rounds = Counter(zip(drafted, accepted, strict=True))
        details = {"per_step_accepted": accepted, "per_step_drafted": drafted} if is_detailed else {}
        metrics = SpeculationMetrics(
            mean_acceptance_length=1 + sum(accepted) / steps if steps else 1.0,
            draft_acceptance_rate=sum(accepted) / sum(drafted) if steps else 0.0,
            acceptance_histogram=[accepted.count(count) for count in range(longest + 1)],
            acceptance_histogram_by_draft_length={
                length: [rounds[length, count] for count in range(length + 1)] for length in sorted(set(drafted))
            },
            num_spec_steps=steps,
            num_accepted_draft_tokens=sum(accepted),
            num_draft_tokens=sum(drafted),
            num_spec_tokens=longest,
            **details,
        )
        return RequestMetrics(speculative_decoding=metrics)


def _round(trace: RoundTrace, token_bytes: TokenBytes) -> Round:
    drafted, parents, accepted = trace.draft_token_ids, trace.parents, len(trace.path)
    last: Any = "bonus" if (trace.path or [-1])[-1] not in parents else "recovered"
    if len(trace.texts) == accepted or not drafted:
        last = "accepted" if drafted else "plain"
    is_chain = parents == list(range(-1, len(parents) - 1))
    tree = {} if is_chain else {"parents": parents}
    return Round(texts=trace.texts, accepted=accepted, draft=token_bytes.texts(drafted), last=last, **tree)


def event(body: object) -> str:
    """Return a server-sent event with a response or a response's fields."""
    return f"data: {to_json(body)}\n\n"
