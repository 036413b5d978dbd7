"""Writer: turns the rounds of a request into a body or events; the base class of the writers of all three APIs."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.errors import ErrorBody, ErrorDetail
from deployments.openai.choices import Choice, speculation_metrics, usage
from deployments.openai.fields import ResponseModel
from deployments.openai.sampling_fields import GenerationRequest
from engine.sequence import RequestOutput


class Decoder(Protocol):
    """Turns token ids into text."""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone."""
        ...


@dataclass(slots=True)
class Writer(ABC):
    """Writes one response, as one body or as events; holds the text and tokens of each choice so far."""

    id: str
    model: str
    request: GenerationRequest
    prompts: list[list[int]]
    decoder: Decoder
    num_speculative_tokens: int
    metrics_level: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        """Prepare one choice per sequence."""
        self.choices = [Choice(i, self.prompts[i // self.n]) for i in range(len(self.prompts) * self.n)]

    @abstractmethod
    def opening(self) -> Sequence[ResponseModel]:
        """Return the events before the first tokens."""

    @abstractmethod
    def chunk(self, choice: Choice, output: RequestOutput) -> Sequence[ResponseModel]:
        """Return the events for the next tokens of a choice; the tokens were appended to the choice before."""

    @abstractmethod
    def closing(self) -> Sequence[ResponseModel]:
        """Return the events after the last tokens."""

    @abstractmethod
    def whole(self) -> ResponseModel:
        """Return the body of a response that is not streamed."""

    def failed(self, error: dict[str, Any]) -> ResponseModel:
        """Return the event of an error after the first byte."""
        return ErrorBody(error=ErrorDetail(**error))

    def frame(self, event: ResponseModel) -> str:
        """Return an event as it is sent."""
        return f"data: {event.to_json()}\n\n"

    def end(self) -> str:
        """Return what ends a stream, failed or not."""
        return "data: [DONE]\n\n"

    @property
    def repeats_all(self) -> bool:
        """Whether the last events hold all that came before."""
        return False

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.request.n or 1

    @property
    def common_fields(self) -> dict[str, Any]:
        """The fields every body and chunk starts with."""
        return {"id": self.id, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}

    def token_ids_field(self, token_ids: list[int]) -> dict[str, Any]:
        """Return the field with the token ids, if the client asked for it."""
        return {"token_ids": token_ids} if self.request.return_token_ids else {}

    def prompt_ids_field(self, choice: Choice) -> dict[str, Any]:
        """Return the field with the prompt's token ids, if the client asked for it."""
        return {"prompt_token_ids": choice.prompt_token_ids} if self.request.return_token_ids else {}

    def usage_fields(self) -> dict[str, Any]:
        """Return the token counts, and the acceptance figures if the client or the operator asked for them."""
        fields: dict[str, Any] = {"usage": usage(self.choices, self.n)}
        if self.metrics_level != "none":
            fields["metrics"] = speculation_metrics(self.choices, self.metrics_level, self.num_speculative_tokens)
        return fields

    @property
    def has_usage_chunk(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        options = self.request.stream_options
        return options is not None and options.has_usage

    def chunk_usage_field(self) -> dict[str, Any]:
        """Return a chunk's usage: the counts so far if every chunk has them, null if only the last one does."""
        options = self.request.stream_options
        if options is None or not options.has_usage:
            return {}
        return {"usage": usage(self.choices, self.n) if options.continuous_usage_stats else None}
