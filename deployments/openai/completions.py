"""/v1/completions: its request, its body and chunks, and their writer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    TextOffsets,
    completion_logprobs,
    prompt_logprobs_field,
)
from deployments.openai.sampling_fields import GenerationRequest
from deployments.openai.types import WHOLE, NumAlternatives, ResponseModel, TokenId
from deployments.openai.writer import Choice, FinishReason, RequestMetrics, Round, Usage, Writer, event
from engine.protocols import TokenLogprobs
from engine.requests.output import RequestOutput

MAX_PROMPTS = 64


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    """Text, token ids, or a list of either. No text is the beginning of a document."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    """Tokens to generate at most; 0 only with echo, to score a prompt."""
    best_of: Annotated[int, Field(ge=1, le=128), WHOLE] | None = None
    """Must equal n: nothing is generated to be thrown away."""
    echo: bool | None = None
    """Put the prompt before the text; with logprobs also its tokens' log probabilities (null for the first)."""
    logprobs: NumAlternatives | None = None
    """Alternatives to list for each token, with the log probabilities of the target."""


class CompletionChoice(ResponseModel):
    """One text, or in a stream the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    rounds: list[Round] | None = None


class Completion(ResponseModel):
    """The body of a completion, or one chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    record: dict[str, Any] | None = None


@dataclass(slots=True)
class CompletionWriter(Writer):
    """Writes text completions; `echoes` are the prompts' texts, if requested."""

    request: CompletionRequest
    echoes: Sequence[str] = ()
    offsets: dict[int, TextOffsets] = field(default_factory=dict, init=False)

    @property
    def _is_scored(self) -> bool:
        return bool(self.request.echo) and self.request.logprobs is not None

    def opening(self) -> str:
        """Return the echoed prompts; with log probabilities, they come with the first tokens."""
        if not self.request.echo or self._is_scored:
            return ""
        return "".join(
            self._event([self._choice(choice, Choice(choice.index, []), has_prompt=True)]) for choice in self.choices
        )

    def chunk(self, choice: Choice, output: RequestOutput) -> str:
        is_first = len(choice.token_ids) == len(output.token_ids)
        ids = self.ids_field(prompt_token_ids=choice.prompt_token_ids) if is_first else {}
        return self._event([self._choice(choice, output, has_prompt=is_first and self._is_scored, **ids)])

    def closing(self) -> str:
        return event(self._body([], **self.usage_fields())) if self.has_usage_chunk else ""

    def whole(self) -> Completion:
        choices = [
            self._choice(
                choice,
                choice,
                has_prompt=bool(self.request.echo),
                **self.ids_field(prompt_token_ids=choice.prompt_token_ids),
                **prompt_logprobs_field(self.request.prompt_logprobs, choice, self.reply.token_bytes),
            )
            for choice in self.choices
        ]
        return self._body(choices, **self.usage_fields())

    def _event(self, choices: list[CompletionChoice]) -> str:
        return event(self._body(choices, **self.chunk_usage_field()))

    def _body(self, choices: list[CompletionChoice], **fields: Any) -> Completion:
        return Completion(**self.common_fields("text_completion"), choices=choices, **fields)

    def _choice(
        self, choice: Choice, tokens: Choice | RequestOutput, *, has_prompt: bool = False, **fields: Any
    ) -> CompletionChoice:
        logprobs = None
        if self.request.logprobs is not None:
            token_bytes, skips = self.reply.token_bytes, self.request.skip_special_tokens is not False
            if choice.index not in self.offsets:
                before = [] if self.request.echo else choice.prompt_token_ids
                self.offsets[choice.index] = TextOffsets(token_bytes, before, skips_special=skips)
            offsets = self.offsets[choice.index]
            logprobs = completion_logprobs(choice, tokens, self._scores(tokens), token_bytes, offsets)
        return CompletionChoice(
            index=choice.index,
            text=(self.echoes[choice.index // self.n] if has_prompt else "") + tokens.text,
            logprobs=logprobs,
            finish_reason=tokens.finish_reason,
            stop_reason=tokens.stop_reason,
            **self.ids_field(token_ids=tokens.token_ids),
            **self.rounds_field(choice),
            **fields,
        )

    def _scores(self, tokens: Choice | RequestOutput) -> list[TokenLogprobs] | None:
        if not self._is_scored or tokens.prompt_logprobs is None:
            return None
        count = self.request.logprobs
        return [
            replace(entry, top_ids=entry.top_ids[:count], top_logprobs=entry.top_logprobs[:count])
            for entry in tokens.prompt_logprobs
        ]
