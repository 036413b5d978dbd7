"""The request fields that several APIs share: how to draw tokens, and how to send them."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from deployments.openai.conversation_fields import Content
from deployments.openai.structured_output import (
    GrammarSource,
    ResponseFormat,
    StructuredOutputs,
    format_source,
    structured_source,
)
from deployments.openai.types import (
    WHOLE,
    Finite,
    NumAlternatives,
    RequestModel,
    Salt,
    Seed,
    StopString,
    TokenId,
    at_most,
)
from engine.errors import RequestError


class EventOptions(RequestModel):
    """How a stream's events are sent: without padding that hides the length of their text."""


class StreamOptions(EventOptions):
    """What a stream reports besides text."""

    include_usage: bool | None = None
    """A last chunk with the token counts and no choices."""
    continuous_usage_stats: bool | None = None
    """The token counts so far in every chunk, and the last chunk; nothing if include_usage is false."""

    @property
    def has_usage(self) -> bool:
        return bool(self.continuous_usage_stats) if self.include_usage is None else self.include_usage


class Speculation(RequestModel):
    """Speculation for one request; the text does not depend on it (with the coupled rule)."""

    enabled: bool | None = None
    """false is plain decoding."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64), WHOLE] | None = None
    """Draft tokens per round, at most the server's own."""
    fixed: bool | None = None
    """Draft that many in every round, whatever the server measures; without a number, as many as the server allows."""
    learn: bool | None = None
    """false: with draft_learning, the draft does not learn from this text; nor does it with a cache_salt."""
    metrics: Literal["none", "summary", "detailed"] | None = None
    """Acceptance figures in the response, as `metrics.speculative_decoding`."""
    trace: bool | None = None
    """The rounds that made the text, as `rounds` of the choice; for one choice."""
    record: bool | None = None
    """The answer's `record`, from which `/v1/audit` checks it; in a stream, with the token counts after the text."""


class Prediction(RequestModel):
    """The output that the client expects, such as the file that it wants edited."""

    type: Literal["content"]
    content: Content


class CommonRequest(RequestModel):
    """The fields of all four APIs."""

    CHAT_FIELDS: ClassVar[Mapping[str, str]] = {}
    """Names of fields of the equivalent chat completion request, and their names here."""

    model: str | None = None
    """The served model's name; null is the only one."""
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    """0 is greedy."""
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    """Probability mass to draw from."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    """Tokens to draw from; 0 and -1 are all."""
    seed: Seed | None = None
    """The same seed, prompt and parameters give the same text; with rules other than coupled, only if drafts and rounds
    are the same."""
    stream: bool | None = None
    """Send server-sent events as the text comes."""
    speculative: Speculation | None = None
    """Speculation for this request."""
    cache_salt: Salt | None = None
    """Only requests with the same salt share cached prefixes and copied drafts, and of the same API key."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE] | None = None
    """Lower starts earlier; the default is 0. A positive one lets everybody's requests pass, a negative one passes only
    those of the same API key."""

    def refuse_reports(self) -> None:
        """Raise RequestError for a trace or a record, where the response has no place for it."""
        for name in ("trace", "record"):
            if getattr(self.speculative, name, None):
                field = f"speculative.{name}"
                raise RequestError(f"{field} is not available here; /v1/chat/completions has it", field)


class SamplingRequest(CommonRequest):
    """The fields of OpenAI's three APIs."""

    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    """Least probability relative to the most likely token."""
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    """Taken off the logit of every token generated before."""
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    """Taken off the logit once per time the token was generated."""
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    """Divides the logits of tokens in the prompt or the text so far."""
    stop: StopString | Literal[""] | Annotated[list[StopString], Field(max_length=4)] | None = None
    """Strings that end the text, which does not include them. No text and no strings are none."""
    ignore_eos: bool | None = None
    """Go on past the end-of-sequence token."""


class GenerationRequest(SamplingRequest):
    """The fields that completions and chat completions share."""

    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = None
    """Choices per prompt."""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    """Tokens to generate at most. Without a limit, a chat takes all the room that is left, a completion 16."""
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    """The newer name of max_tokens."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    """Tokens to generate before any stop condition counts."""
    logit_bias: Annotated[dict[str, Annotated[Finite, Field(ge=-100, le=100)]], at_most(300)] | None = None
    """Token id (as a string) to the number added to its logit."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    """Tokens that end the text."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string in the text."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text (the default)."""
    stream_options: StreamOptions | None = None
    """What the stream reports besides text; only with stream."""
    response_format: ResponseFormat | None = None
    """The form of the text."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must match."""
    prediction: Prediction | None = None
    """The expected text, which is drafted from; the text does not depend on it (with the coupled rule)."""
    return_token_ids: bool | None = None
    """Send token ids, too."""
    add_special_tokens: bool | None = None
    """Add the tokens that the tokenizer puts around a text, such as the one that begins it. Default: true for a prompt,
    false for a conversation, whose chat template writes its own."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    """Keep this many tokens of the prompt; -1 is as many as there is room for."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that `truncate_prompt_tokens` cuts off: left (the default) keeps the last tokens."""
    prompt_logprobs: NumAlternatives | None = None
    """Log probabilities of the prompt's tokens, with this many alternatives; not in a stream."""

    def text_source(self) -> GrammarSource | None:
        """Return the client's constraint on the text; raise RequestError if it is empty or one of several."""
        source = format_source(self.response_format)
        if self.structured_outputs is None:
            return source
        if source is not None:
            raise RequestError("structured_outputs is not allowed with a response_format", "structured_outputs")
        return structured_source(self.structured_outputs)
