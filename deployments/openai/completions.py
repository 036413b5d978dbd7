"""/v1/completions: its request, its body and chunks, and their writer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.choices import Choice, FinishReason, RequestMetrics, Usage
from deployments.openai.fields import WHOLE, ResponseModel, Text, TokenId
from deployments.openai.logprobs import CompletionLogprobs, PromptLogprobs, completion_logprobs, prompt_logprobs_field
from deployments.openai.sampling_fields import GenerationRequest
from deployments.openai.writer import Writer
from engine.protocols import TokenLogprobs
from engine.sequence import RequestOutput


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    """Text, token ids, or a list of either. No text is the beginning of a document."""
    suffix: Literal[""] | None = None
    """No text, since models here only go on with a text."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    """Tokens to generate at most; 0 only with echo, to score a prompt."""
    best_of: Annotated[int, Field(ge=1, le=128), WHOLE] | None = None
    """Must equal n: nothing is generated to be thrown away."""
    echo: bool | None = None
    """Put the prompt before the text; with logprobs also its tokens' log probabilities, of which the first is null."""
    logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
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


class Completion(ResponseModel):
    """The body of a completion, or one chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class CompletionWriter(Writer):
    """Writes text completions; `echoes` are the texts of the prompts, if the client wants them."""

    request: CompletionRequest
    echoes: Sequence[str] = ()

    @property
    def _is_scored(self) -> bool:
        """Whether the prompt is reported with its log probabilities."""
        return bool(self.request.echo) and self.request.logprobs is not None

    def opening(self) -> list[Completion]:
        """Return the prompts if they are echoed; with log probabilities, they come with the first tokens."""
        if not self.request.echo or self._is_scored:
            return []
        return [
            self._body([self._choice(choice, self._prompt_text(choice), [], None, None)], **self.chunk_usage_field())
            for choice in self.choices
        ]

    def chunk(self, choice: Choice, output: RequestOutput) -> list[Completion]:
        """Return the chunk with the next tokens of a choice."""
        is_first = len(choice.token_ids) == len(output.token_ids)
        text = self._prompt_text(choice) + output.text if is_first and self._is_scored else output.text
        logprobs = None
        if output.logprobs is not None:
            logprobs = completion_logprobs(
                choice, output.token_ids, output.logprobs, self._scores(output), self.decoder
            )
        piece = self._choice(choice, text, output.token_ids, logprobs, output)
        if is_first:
            piece = piece.model_copy(update=self.prompt_ids_field(choice))
        return [self._body([piece], **self.chunk_usage_field())]

    def closing(self) -> list[Completion]:
        """Return the chunk with the token counts and no choices, if the client asked for it."""
        return [self._body([], **self.usage_fields())] if self.has_usage_chunk else []

    def whole(self) -> Completion:
        """Return the body of a response that is not streamed."""
        choices = []
        for choice in self.choices:
            text = self._prompt_text(choice) + choice.text if self.request.echo else choice.text
            logprobs = None
            if choice.logprobs or self._is_scored:
                logprobs = completion_logprobs(
                    choice, choice.token_ids, choice.logprobs, self._scores(choice), self.decoder
                )
            complete = self._choice(choice, text, choice.token_ids, logprobs, choice)
            fields = {**self.prompt_ids_field(choice), **prompt_logprobs_field(self.request, choice, self.decoder)}
            choices.append(complete.model_copy(update=fields))
        return self._body(choices, **self.usage_fields())

    def _body(self, choices: list[CompletionChoice], **fields: Any) -> Completion:
        return Completion(**self.common_fields, object="text_completion", choices=choices, **fields)

    def _scores(self, source: Choice | RequestOutput) -> list[TokenLogprobs] | None:
        """Return the log probabilities of an echoed prompt, with as many alternatives as `logprobs` says."""
        if not self._is_scored or source.prompt_logprobs is None:
            return None
        count = self.request.logprobs
        return [
            replace(entry, top_ids=entry.top_ids[:count], top_logprobs=entry.top_logprobs[:count])
            for entry in source.prompt_logprobs
        ]

    def _prompt_text(self, choice: Choice) -> str:
        return self.echoes[choice.index // self.n]

    def _choice(
        self,
        choice: Choice,
        text: str,
        token_ids: list[int],
        logprobs: CompletionLogprobs | None,
        end: Choice | RequestOutput | None,
    ) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=logprobs,
            finish_reason=end.finish_reason if end else None,
            stop_reason=end.stop_reason if end else None,
            **self.token_ids_field(token_ids),
        )
