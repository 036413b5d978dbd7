"""/v1/responses, OpenAI's newer form of a conversation: its request, its body and events, and their writer."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.choices import Choice, Usage, usage
from deployments.openai.fields import Name, RequestModel, ResponseModel, Text
from deployments.openai.messages import ChatMessage, InputMessage
from deployments.openai.sampling_fields import SamplingRequest
from deployments.openai.structured_output import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat
from deployments.openai.writer import Writer
from engine.sequence import RequestOutput

CHAT_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""The fields of a chat completion request that have another name here."""


class NamedSchemaFormat(RequestModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    name: Name
    """Not shown to the model."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The schema."""
    description: Text | None = None
    """Accepted and ignored: the model sees the conversation only."""
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
    """A system message before the input."""
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
        """Return the chat completion request that gives the same text."""
        messages = [ChatMessage(role="system", content=self.instructions)] if self.instructions is not None else []
        if isinstance(self.input, str):
            messages.append(ChatMessage(role="user", content=self.input))
        else:
            messages += [message.to_chat() for message in self.input]
        text_format = self.text.format if self.text else None
        response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None
        if isinstance(text_format, NamedSchemaFormat):
            schema = JsonSchema(name=text_format.name, schema=text_format.schema_)
            response_format = JsonSchemaFormat(type="json_schema", json_schema=schema)
        else:
            response_format = text_format
        return ChatCompletionRequest(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=response_format,
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


@dataclass(slots=True, kw_only=True)
class ResponsesWriter(Writer):
    """Writes one response of one message of one text; `request` is the chat completion that generates it."""

    responses_request: ResponsesRequest
    num_events: int = field(default=0, init=False)

    def opening(self) -> list[ResponseModel]:
        """Return the events before the first tokens."""
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
            self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
            self._event("response.content_part.added", **self._location, part=_part("")),
        ]

    def chunk(self, choice: Choice, output: RequestOutput) -> list[ResponseModel]:
        """Return the event with the next text; none if the tokens have no text yet."""
        if not output.text:
            return []
        return [self._event("response.output_text.delta", **self._location, delta=output.text, logprobs=[])]

    def closing(self) -> list[ResponseModel]:
        """Return the events after the last tokens."""
        text, status = self.choices[0].text, self._status
        part = _part(text)
        return [
            self._event("response.output_text.done", **self._location, text=text, logprobs=[]),
            self._event("response.content_part.done", **self._location, part=part),
            self._event("response.output_item.done", output_index=0, item=self._message(status, [part])),
            self._event(f"response.{status}", response=self._response(status)),
        ]

    def failed(self, error: dict[str, Any]) -> ResponseModel:
        """Return the event of an error after the first byte."""
        return self._event("error", message=error["message"], param=error["param"], code=error["code"])

    def frame(self, event: ResponseModel) -> str:
        """Return an event as it is sent: named by its type."""
        assert isinstance(event, ResponseEvent)
        return f"event: {event.type}\ndata: {event.to_json()}\n\n"

    def end(self) -> str:
        """Return nothing: the last event says that it is the last."""
        return ""

    def whole(self) -> ResponseModel:
        """Return the body of a response that was not streamed."""
        return self._response(self._status)

    @property
    def _status(self) -> Status:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    @property
    def _location(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    @property
    def _message_id(self) -> str:
        return self.id.replace("resp_", "msg_")

    def _event(self, type: str, **fields: Any) -> ResponseEvent:
        self.num_events += 1
        return ResponseEvent(type=type, sequence_number=self.num_events - 1, **fields)

    def _message(self, status: Status, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self._message_id, type="message", role="assistant", status=status, content=content)

    def _response(self, status: Status) -> Response:
        request, has_ended = self.responses_request, status != "in_progress"
        text_format = request.text.format if request.text else None
        return Response(
            id=self.id,
            object="response",
            created_at=self.created,
            model=self.model,
            status=status,
            output=[self._message(status, [_part(self.choices[0].text)])] if has_ended else [],
            usage=ResponseUsage.of(usage(self.choices, 1)) if has_ended else None,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=bool(request.parallel_tool_calls),
            previous_response_id=None,
            store=False,
            temperature=1.0 if request.temperature is None else request.temperature,
            text={
                "format": text_format.model_dump(by_alias=True, exclude_none=True) if text_format else {"type": "text"}
            },
            tool_choice="none",
            tools=[],
            top_p=1.0 if request.top_p is None else request.top_p,
            truncation="disabled",
        )


def _part(text: str) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])
