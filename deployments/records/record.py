"""Record: a request and the tokens and seed of its answer, all that an audit needs; a line of JSON in a file."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from deployments.anthropic.messages_request import MessagesRequest
from deployments.errors import validation_message
from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.completions import CompletionRequest
from deployments.openai.responses_request import ResponsesRequest
from deployments.openai.types import JsonObject, RequestModel, Seed, TokenId
from deployments.openai.writer import Writer
from engine.errors import RequestError

GeneratingRequest = CompletionRequest | ChatCompletionRequest | ResponsesRequest | MessagesRequest
REQUESTS: Mapping[str, type[GeneratingRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
PATHS: Mapping[type[GeneratingRequest], Any] = {model: path for path, model in REQUESTS.items()}
WITHOUT_EFFECT = frozenset(
    {"stream", "stream_options", "speculative", "prediction", "priority", "echo", "prompt_logprobs", "return_token_ids"}
)
"""GeneratingRequest fields that change no token of the answer."""


class RecordedChoice(RequestModel):
    """One text of an answer. Null is what is not known, and not compared."""

    token_ids: list[TokenId] | None = None
    """Its tokens, with the one that ended it. Without them, the text is tokenized."""
    text: str | None = None
    """Its text before thoughts and calls are parted from it."""
    finish_reason: Literal["stop", "length"] | None = None
    """Why it ended."""
    stop_reason: int | str | None = None
    """The stop string or token that ended it."""
    logprobs: list[float] | None = None
    """The log probability of each token, if the request asked for them."""


class Record(RequestModel):
    """The body of /v1/audit: a request and its answer."""

    version: Literal[1] = 1
    """Of this form."""
    path: Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
    """The route."""
    body: JsonObject
    """The request, as the route takes it."""
    seed: Seed | None = None
    """The seed that was drawn with: the request's, or the server's choice."""
    system_fingerprint: str | None = None
    """Of the server that answered."""
    verification: str | None = None
    """The rule that it verified drafts by."""
    created: int | None = None
    """When, in seconds since 1970."""
    seconds: float | None = None
    """How long the answer took."""
    choices: Annotated[list[RecordedChoice], Field(min_length=1)]
    """The texts: those of the first prompt, then those of the next."""

    def request(self) -> GeneratingRequest:
        """Return the request without the fields that change no token; raise RequestError that names a wrong field."""
        model = REQUESTS[self.path]
        try:
            request = model.model_validate(self.body)
        except ValidationError as error:
            errors: Any = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
            message, param = validation_message(errors, self.body)
            raise RequestError(f"body: {message}", f"body.{param}" if param else "body") from None
        return request.model_copy(update=dict.fromkeys(WITHOUT_EFFECT & model.model_fields.keys()))


@dataclass(slots=True)
class Recording:
    """An answer that is being written, and becomes a record; its writer sends it if the client asks for it."""

    request: GeneratingRequest
    writer: Writer
    seed: int
    verification: str
    started: float = field(default_factory=time.monotonic)
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self._is_wanted:
            self.writer.record = lambda: self.record().model_dump(mode="json", exclude_none=True)

    @property
    def _is_wanted(self) -> bool:
        return bool(self.request.speculative and self.request.speculative.record)

    @property
    def is_allowed(self) -> bool:
        """Whether an operator may keep the record: with a `cache_salt`, only if the client asks for it, too."""
        return self.request.cache_salt is None or self._is_wanted

    def stop(self) -> None:
        """Note how long the answer took."""
        self.seconds = round(time.monotonic() - self.started, 4)

    def record(self) -> Record:
        """Return the record of the writer's answer, which must be whole."""
        if self.seconds is None:
            self.stop()
        choices = [
            RecordedChoice(
                token_ids=choice.token_ids,
                text=choice.text,
                finish_reason="stop" if choice.finish_reason == "tool_calls" else choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=[position.logprob for position in choice.logprobs] if choice.logprobs else None,
            )
            for choice in self.writer.choices
        ]
        return Record(
            version=1,
            path=PATHS[type(self.request)],
            body=self.request.model_dump(mode="json", by_alias=True, exclude_unset=True),
            seed=self.seed,
            system_fingerprint=self.writer.reply.fingerprint,
            verification=self.verification,
            created=self.writer.reply.created,
            seconds=self.seconds,
            choices=choices,
        )
