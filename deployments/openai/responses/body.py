"""The body of a response: its output items and token counts, and the events of a stream."""

from typing import Any, Literal

from deployments.openai.choices import Usage
from deployments.openai.fields import ResponseModel
from deployments.openai.logprobs import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str]
    logprobs: list[TokenLogprob]


class OutputMessage(ResponseModel):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class OutputCall(ResponseModel):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(ResponseModel):
    """Where the input's tokens came from."""

    cached_tokens: int


class OutputTokensDetails(ResponseModel):
    """What the output's tokens were for."""

    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        """Return a chat completion's counts by their newer names."""
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(ResponseModel):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class Response(ResponseModel):
    """The body of a response."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Status
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]


class ResponseEvent(ResponseModel):
    """One event of a response's stream; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: Response | None = None
    item: OutputItem | None = None
    part: OutputText | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    logprobs: list[TokenLogprob] | None = None
    message: str | None = None
    param: str | None = None
    code: str | None = None
