"""The bodies of /v1/responses, OpenAI's newer shape of a conversation: text in, text out."""

from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.bodies import ResponseModel, Usage
from deployments.openai.fields import RequestModel, Text
from deployments.openai.requests import (
    ChatCompletionRequest,
    ChatMessage,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    SamplingRequest,
    TextFormat,
)

CHAT_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""What is called differently in a chat completion request."""


class InputPart(RequestModel):
    """A piece of an item's text, or of an earlier answer's."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = None
    """Accepted and ignored: earlier answers come back with it."""
    logprobs: list[Any] | None = None
    """Accepted and ignored: earlier answers come back with it."""


class InputMessage(RequestModel):
    """One message of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputPart], Field(min_length=1)]
    id: Text | None = None
    """Accepted and ignored: earlier answers come back with it."""
    status: Text | None = None
    """Accepted and ignored: earlier answers come back with it."""

    def to_chat(self) -> ChatMessage:
        """Return the message of a chat completion."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return ChatMessage(role=self.role, content=text)


class NamedSchemaFormat(RequestModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    """Not shown to the model."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The schema."""
    description: Text | None = None
    """Accepted and ignored: the conversation is what the model sees."""
    strict: bool | None = None
    """Accepted and ignored: the answer always matches."""


class TextOptions(RequestModel):
    """The form of the answer."""

    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None
    """Any text, a JSON object, or JSON that a schema accepts."""


class ResponsesRequest(SamplingRequest):
    """The body of /v1/responses. Nothing is stored, so a conversation is sent whole each time."""

    input: Text | Annotated[list[InputMessage], Field(min_length=1)]
    """What the user says, or the conversation."""
    instructions: Text | None = None
    """A system message before it."""
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Tokens to generate at most; without it, all the room that is left."""
    text: TextOptions | None = None
    """The form of the answer."""
    truncation: Literal["disabled"] | None = None
    """Input that does not fit is refused, never cut."""
    parallel_tool_calls: bool | None = None
    """Accepted and ignored: there are no tools here."""
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    """None; /v1/chat/completions has tools."""
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    """None: nothing beside the text can be asked for."""
    metadata: dict[Text, Text] | None = None
    """Sent back with the answer."""

    def to_chat(self) -> ChatCompletionRequest:
        """Return the chat completion that this asks for."""
        messages = [ChatMessage(role="system", content=self.instructions)] if self.instructions is not None else []
        if isinstance(self.input, str):
            messages.append(ChatMessage(role="user", content=self.input))
        else:
            messages += [message.to_chat() for message in self.input]
        asked = self.text.format if self.text else None
        form: TextFormat | JsonObjectFormat | JsonSchemaFormat | None
        if isinstance(asked, NamedSchemaFormat):
            schema = JsonSchema(name=asked.name, schema=asked.schema_)
            form = JsonSchemaFormat(type="json_schema", json_schema=schema)
        else:
            form = asked
        return ChatCompletionRequest(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=form,
            **{name: getattr(self, name) for name in SamplingRequest.model_fields},
        )


Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str]
    logprobs: list[str]


class OutputMessage(ResponseModel):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


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
    output: list[OutputMessage]
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
    tool_choice: Literal["none"]
    tools: list[str]
    top_p: float
    truncation: Literal["disabled"]


class ResponseEvent(ResponseModel):
    """One event of a response's stream; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: Response | None = None
    item: OutputMessage | None = None
    part: OutputText | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[str] | None = None
    message: str | None = None
    param: str | None = None
    code: str | None = None
