"""Response models of the HTTP API, in OpenAI's shape with vLLM's additions.

Fields without a default are always sent, null or not; a field with a default is left out unless it was set.
"""

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class ResponseModel(BaseModel):
    """A JSON object for a client."""

    def to_json(self) -> str:
        """Return the JSON text."""
        return self.model_dump_json(exclude_unset=True)


class PromptTokensDetails(ResponseModel):
    """Where the prompt's tokens came from."""

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


class CompletionLogprobs(ResponseModel):
    """Log probabilities of a completion's tokens."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(ResponseModel):
    """One text, or in a stream the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(ResponseModel):
    """The body of a completion, or one chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class TopLogprob(ResponseModel):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token at a position, and the alternatives to it."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Log probabilities of a message's tokens."""

    content: list[TokenLogprob]


class FunctionCall(ResponseModel):
    """A function's name and its arguments, as JSON text."""

    name: str
    arguments: str


class ToolCall(ResponseModel):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(ResponseModel):
    """The next piece of a call's arguments; the function's name and no arguments yet, where the call begins."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """The next piece of a call, with its place among the answer's calls; id and type only where it begins."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class AssistantMessage(ResponseModel):
    """The whole answer; its content is null if it only calls."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] | None = None


class Delta(ResponseModel):
    """The next piece of the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(ResponseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatChunkChoice(ResponseModel):
    """The next piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseModel):
    """The body of a chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    metrics: RequestMetrics | None = None


class ChatCompletionChunk(ResponseModel):
    """One chunk of a chat completion's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    metrics: RequestMetrics | None = None


class ModelCard(ResponseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(ResponseModel):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(ResponseModel):
    """What a text is to the model."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(ResponseModel):
    """What tokens are as text."""

    prompt: str


class Version(ResponseModel):
    """The server's version."""

    version: str


class Health(ResponseModel):
    """Whether the server makes progress."""

    status: Literal["ok"]


class ErrorDetail(ResponseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponseModel):
    """The body of every error."""

    error: ErrorDetail
