"""Writers: from the rounds of a request to OpenAI's bodies and chunks, for completions and what both kinds share."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.ingress.prompts import PromptEncoder
from deployments.openai import bodies as r
from deployments.openai.choices import Choice, speculation_metrics, usage
from deployments.openai.requests import ChatCompletionRequest, CompletionRequest
from engine.protocols import TokenLogprobs
from engine.sequence import RequestOutput


@dataclass(slots=True)
class Writer:
    """What both kinds of response share: ids, figures and the state of every choice."""

    id: str
    model: str
    request: CompletionRequest | ChatCompletionRequest
    prompts: list[list[int]]
    encoder: PromptEncoder
    num_speculative_tokens: int
    metrics_level: str
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        """Prepare one choice per sequence."""
        self.choices = [Choice(i, self.prompts[i // self.n]) for i in range(len(self.prompts) * self.n)]

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.request.n or 1

    @property
    def common(self) -> dict[str, Any]:
        """The fields every body and chunk starts with."""
        return {"id": self.id, "created": self.created, "model": self.model}

    def figures(self) -> dict[str, Any]:
        """Return usage, and the acceptance figures if they are wanted."""
        found: dict[str, Any] = {"usage": usage(self.choices, self.n)}
        if self.metrics_level != "none":
            found["metrics"] = speculation_metrics(self.choices, self.metrics_level, self.num_speculative_tokens)
        return found

    def ids(self, token_ids: list[int]) -> dict[str, Any]:
        """Return the token ids' field, if it is wanted."""
        return {"token_ids": token_ids} if self.request.return_token_ids else {}

    def prompt_ids(self, choice: Choice) -> dict[str, Any]:
        """Return the prompt's token ids' field, if it is wanted."""
        return {"prompt_token_ids": choice.prompt_token_ids} if self.request.return_token_ids else {}

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a chunk of figures."""
        options = self.request.stream_options
        return options is not None and bool(options.include_usage)

    def failed(self, error: dict[str, Any]) -> r.ResponseModel:
        """Return the event of an error after the first byte."""
        return r.ErrorBody(error=r.ErrorDetail(**error))

    def frame(self, event: r.ResponseModel) -> str:
        """Return an event as it is sent."""
        return f"data: {event.to_json()}\n\n"

    def end(self) -> str:
        """Return what ends a stream, failed or not."""
        return "data: [DONE]\n\n"

    def chunk_usage(self) -> dict[str, Any]:
        """Return a chunk's usage: so far, if every chunk is to carry it; null, if only the last one does; else none."""
        options = self.request.stream_options
        if options is None:
            return {}
        if options.continuous_usage_stats:
            return {"usage": usage(self.choices, self.n)}
        return {"usage": None} if options.include_usage else {}


class ResponseWriter(Protocol):
    """Writes one response, whole or in events."""

    id: str
    choices: list[Choice]

    def opening(self) -> list[r.ResponseModel]:
        """Return the events before the first tokens."""
        ...

    def chunk(self, choice: Choice, output: RequestOutput) -> Sequence[r.ResponseModel]:
        """Return the events of what one choice was delivered."""
        ...

    def closing(self) -> list[r.ResponseModel]:
        """Return the events after the last tokens."""
        ...

    def failed(self, error: dict[str, Any]) -> r.ResponseModel:
        """Return the event of an error after the first byte."""
        ...

    def frame(self, event: r.ResponseModel) -> str:
        """Return an event as it is sent."""
        ...

    def end(self) -> str:
        """Return what ends a stream, failed or not."""
        ...

    def whole(self) -> r.ResponseModel:
        """Return the body of a response that was not streamed."""
        ...


class CompletionWriter(Writer):
    """Writes text completions."""

    def _echoes(self) -> bool:
        return isinstance(self.request, CompletionRequest) and bool(self.request.echo)

    def _scores(self) -> bool:
        return self._echoes() and self.request.logprobs is not None

    def opening(self) -> list[r.ResponseModel]:
        """Return the prompts, if they are to be echoed; with log probabilities, they come with the first tokens."""
        if not self._echoes() or self._scores():
            return []
        return [
            r.Completion(
                **self.common,
                object="text_completion",
                choices=[self._choice(choice, self._prompt_text(choice), [], None, None)],
                **self.chunk_usage(),
            )
            for choice in self.choices
        ]

    def chunk(self, choice: Choice, output: RequestOutput) -> list[r.ResponseModel]:
        """Return the chunk of what one choice was delivered."""
        is_first = len(choice.token_ids) == len(output.token_ids)
        text = self._prompt_text(choice) + output.text if is_first and self._scores() else output.text
        logprobs = None
        if output.logprobs is not None:
            logprobs = self._logprobs(choice, output.token_ids, output.logprobs, output.prompt_logprobs)
        piece = self._choice(choice, text, output.token_ids, logprobs, output)
        if is_first:
            piece = piece.model_copy(update=self.prompt_ids(choice))
        return [r.Completion(**self.common, object="text_completion", choices=[piece], **self.chunk_usage())]

    def closing(self) -> list[r.ResponseModel]:
        """Return the chunk with the usage and no choices, if it is wanted."""
        if not self.wants_usage:
            return []
        return [r.Completion(**self.common, object="text_completion", choices=[], **self.figures())]

    def whole(self) -> r.ResponseModel:
        """Return the body of a response that was not streamed."""
        choices = []
        for choice in self.choices:
            text = self._prompt_text(choice) + choice.text if self._echoes() else choice.text
            logprobs = None
            if choice.logprobs or choice.prompt_logprobs is not None:
                logprobs = self._logprobs(choice, choice.token_ids, choice.logprobs, choice.prompt_logprobs)
            piece = self._choice(choice, text, choice.token_ids, logprobs, choice)
            choices.append(piece.model_copy(update=self.prompt_ids(choice)))
        return r.Completion(**self.common, object="text_completion", choices=choices, **self.figures())

    def _prompt_text(self, choice: Choice) -> str:
        return self.encoder.decode(choice.prompt_token_ids, skip_special_tokens=True)

    def _choice(
        self,
        choice: Choice,
        text: str,
        token_ids: list[int],
        logprobs: r.CompletionLogprobs | None,
        end: Choice | RequestOutput | None,
    ) -> r.CompletionChoice:
        return r.CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=logprobs,
            finish_reason=end.finish_reason if end else None,
            stop_reason=end.stop_reason if end else None,
            **self.ids(token_ids),
        )

    def _logprobs(
        self,
        choice: Choice,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[TokenLogprobs] | None,
    ) -> r.CompletionLogprobs:
        found: list[TokenLogprobs | None] = [*logprobs]
        if prompt_logprobs is not None:
            token_ids = choice.prompt_token_ids + token_ids
            found = [None, *prompt_logprobs, *found]
        texts = self.encoder.token_texts(token_ids)
        offsets = []
        for text in texts:
            offsets.append(choice.num_logprob_chars)
            choice.num_logprob_chars += len(text)
        return r.CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[position.logprob if position else None for position in found],
            tokens=texts,
            top_logprobs=[
                dict(zip(self.encoder.token_texts(position.top_ids), position.top_logprobs, strict=True))
                | {text: position.logprob}
                if position
                else None
                for text, position in zip(texts, found, strict=True)
            ],
        )
