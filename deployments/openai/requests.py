"""Request models of the HTTP API: every field with its type and range; limits that an operator sets come later."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from deployments.openai.fields import Finite, RequestModel, Salt, Seed, StopString, Text, TokenId
from deployments.openai.tools import PastCall, Tool, ToolChoice


class StreamOptions(RequestModel):
    """What a stream reports besides text."""

    include_usage: bool | None = None
    """A last chunk with the token counts and no choices."""
    continuous_usage_stats: bool | None = None
    """The token counts so far in every chunk."""


class Speculation(RequestModel):
    """Speculation for one request; the text does not depend on it (with the coupled rule)."""

    enabled: bool | None = None
    """false is plain decoding."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] | None = None
    """Draft tokens per round, at most the server's own."""
    metrics: Literal["none", "summary", "detailed"] | None = None
    """Acceptance figures in the response, as `metrics.speculative_decoding`."""


class StructuredOutputs(RequestModel):
    """What the text must match, at every token: exactly one of these, with vLLM's names."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    """A JSON schema, as an object or as its text."""
    regex: Text | None = None
    """A regular expression for the whole text, in Rust's syntax."""
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    """Texts of which it is one."""
    grammar: Text | None = None
    """A grammar in Lark's or llama.cpp's (GBNF) notation."""


class SamplingRequest(RequestModel):
    """What every request for text has: how to draw it, and how to send it."""

    model: str | None = None
    """The served model's name; null is the only one."""
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    """0 is greedy."""
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    """Probability mass to draw from."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Tokens to draw from; 0 and -1 are all."""
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    """Least probability relative to the most likely token."""
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    """Taken off the logit of every token generated before."""
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    """Taken off the logit once per time the token was generated."""
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    """Divides the logits of tokens in the prompt or the text so far."""
    seed: Seed | None = None
    """The same seed, prompt and parameters give the same text."""
    stop: StopString | list[StopString] | None = None
    """Strings that end the text, which does not include them."""
    ignore_eos: bool | None = None
    """Go on past the end-of-sequence token."""
    stream: bool | None = None
    """Send server-sent events as the text comes."""
    speculative: Speculation | None = None
    """Speculation for this request."""
    cache_salt: Salt | None = None
    """Only requests with the same salt share cached prefixes."""
    user: Text | None = None
    """Accepted and ignored: it cannot change the text."""
    metadata: dict[Text, Text] | None = None
    """Accepted and ignored: it cannot change the text."""
    safety_identifier: Text | None = None
    """Accepted and ignored: it cannot change the text."""
    service_tier: Text | None = None
    """Accepted and ignored: there is one tier."""
    store: bool | None = None
    """Accepted and ignored: nothing is stored."""


class GenerationRequest(SamplingRequest):
    """What completions and chat completions have in common."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    """Choices per prompt."""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Tokens to generate at most."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Tokens to generate before any stop condition counts."""
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    """Token id (as a string) to what is added to its logit."""
    stop_token_ids: list[TokenId] | None = None
    """Tokens that end the text."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string in the text."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text (the default)."""
    stream_options: StreamOptions | None = None
    """What the stream reports besides text; only with stream."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must match."""
    return_token_ids: bool | None = None
    """Token ids besides the text."""


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    """Text, token ids, or a list of either."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Tokens to generate at most; 0 only with echo, to score a prompt."""
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    """Must equal n: nothing is generated to be thrown away."""
    echo: bool | None = None
    """Put the prompt before the text; with logprobs also its tokens' log probabilities, of which the first is null."""
    logprobs: Annotated[int, Field(ge=0)] | None = None
    """Alternatives to list for each token, with the log probabilities of the target."""


class TextPart(RequestModel):
    """A piece of a message's text."""

    type: Literal["text"]
    text: Text


class ChatMessage(RequestModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks; developer is another name for system."""
    content: Text | Annotated[list[TextPart], Field(min_length=1)] | None = None
    """Text, or parts of text; null beside tool calls. Other parts (images, audio) are refused."""
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    """The speaker's name, for chat templates that show it."""
    tool_calls: Annotated[list[PastCall], Field(min_length=1)] | None = None
    """The calls in an earlier answer."""
    tool_call_id: Text | None = None
    """The call that this is the result of."""

    @model_validator(mode="after")
    def _check_role(self) -> "ChatMessage":
        if self.content is None and self.tool_calls is None:
            raise ValueError("content is required")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls is for the role assistant, not {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id goes with the role tool, and only with it")
        return self

    def text(self) -> str:
        """Return the content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """A JSON schema and its name."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    """Not shown to the model."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The schema."""
    description: Text | None = None
    """Accepted and ignored: the conversation is what the model sees."""
    strict: bool | None = None
    """Accepted and ignored: the answer always matches."""


class JsonSchemaFormat(RequestModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """The conversation."""
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Tokens to generate at most; the newer name of max_tokens. Without either: all the room that is left."""
    logprobs: bool | None = None
    """Log probabilities of the target for each token."""
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Alternatives to list for each token; only with logprobs."""
    response_format: ResponseFormat | None = None
    """The form of the answer."""
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    """Text is all there is."""
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    """What the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """Whether it must: auto (the default with tools) leaves it to the model; a required call follows its schema."""
    parallel_tool_calls: bool | None = None
    """Whether several calls may be required at once (the default)."""

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which one must be called."""
        if self.tool_choice == "required":
            return self.tools or []
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools or [] if tool.function.name == name]
        return []

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []


class TokenizeRequest(RequestModel):
    """The body of /tokenize: a prompt, or messages to run through the chat template."""

    model: str | None = None
    """The served model's name; null is the only one."""
    prompt: Text | None = None
    """Text to tokenize as /v1/completions would."""
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    """A conversation to tokenize as /v1/chat/completions would."""
    return_token_strs: bool | None = None
    """The text of each token besides its id."""


class DetokenizeRequest(RequestModel):
    """The body of /detokenize."""

    model: str | None = None
    """The served model's name; null is the only one."""
    tokens: list[TokenId]
    """Token ids."""
