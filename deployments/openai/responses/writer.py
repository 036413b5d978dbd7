"""ResponsesWriter: turns the rounds of a chat completion into a response or its events."""

from dataclasses import dataclass, field
from typing import Any

from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.choices import Choice, usage
from deployments.openai.fields import ResponseModel
from deployments.openai.logprobs import TokenLogprob, chat_logprobs
from deployments.openai.responses.body import (
    IncompleteDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    Response,
    ResponseEvent,
    ResponseUsage,
    Status,
)
from deployments.openai.responses.request import ResponsesRequest
from deployments.openai.tool_calls import Arguments, CallReader, CallStart, Piece
from deployments.openai.tools import ToolForm
from deployments.openai.writer import Writer
from engine.sequence import RequestOutput


@dataclass(slots=True, kw_only=True)
class ResponsesWriter(Writer):
    """Writes one response; `request` is the chat completion that generates its text.

    The text becomes items: messages, and calls of functions. Only the last item can be in progress.
    """

    request: ChatCompletionRequest
    responses_request: ResponsesRequest
    tool_form: ToolForm | None = None
    num_events: int = field(default=0, init=False)
    items: list[OutputItem] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, init=False)
    """Of the tokens whose text is still to come."""
    reader: CallReader | None = field(default=None, init=False)

    def opening(self) -> list[ResponseModel]:
        """Return the events before the first tokens."""
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
        ]

    def chunk(self, choice: Choice, output: RequestOutput) -> list[ResponseModel]:
        """Return the events with the next text; none if the tokens have no text yet."""
        return [*self._add(output, is_last=output.finish_reason is not None)]

    def closing(self) -> list[ResponseModel]:
        """Return the events after the last tokens."""
        events = [] if self.items else self._begin_message()
        events += self._end_item(self._status)
        return [*events, self._event(f"response.{self._status}", response=self._response(self._status))]

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
        self._add(self.choices[0], is_last=True)
        self.closing()
        return self._response(self._status)

    @property
    def repeats_all(self) -> bool:
        """Whether the last events hold all that came before: the ends of text, part, item and response do."""
        return True

    @property
    def _status(self) -> Status:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    @property
    def _location(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}

    def _event(self, type: str, **fields: Any) -> ResponseEvent:
        self.num_events += 1
        return ResponseEvent(type=type, sequence_number=self.num_events - 1, **fields)

    def _add(self, tokens: Choice | RequestOutput, *, is_last: bool) -> list[ResponseEvent]:
        """Append the next tokens to the items; return the events that say so."""
        if tokens.logprobs:
            self.logprobs += chat_logprobs(tokens.token_ids, tokens.logprobs, self.decoder).content
        pieces: list[Piece] = [tokens.text]
        if self.request.offered_tools and self.tool_form is not None:
            self.reader = self.reader or self.tool_form.reader()
            pieces = self.reader.feed(tokens.text, is_last=is_last)
        return [event for piece in pieces if piece for event in self._add_piece(piece)]

    def _add_piece(self, piece: Piece) -> list[ResponseEvent]:
        match piece:
            case CallStart():
                return [*self._end_item("completed"), *self._begin_call(piece)]
            case Arguments():
                return [self._add_arguments(piece.text)]
            case _:
                is_open = bool(self.items) and isinstance(self.items[-1], OutputMessage)
                start = [] if is_open else [*self._end_item("completed"), *self._begin_message()]
                return [*start, self._add_text(piece)]

    def _begin_message(self) -> list[ResponseEvent]:
        message = OutputMessage(
            id=self._item_id("msg"), type="message", role="assistant", status="in_progress", content=[]
        )
        self.items.append(message)
        added = self._event("response.output_item.added", output_index=len(self.items) - 1, item=message.model_copy())
        part = OutputText(type="output_text", text="", annotations=[], logprobs=[])
        message.content = [part]
        begun = self._event(
            "response.content_part.added", **self._location, content_index=0, part=part.model_copy(deep=True)
        )
        return [added, begun]

    def _begin_call(self, start: CallStart) -> list[ResponseEvent]:
        call = OutputCall(
            id=self._item_id("fc"),
            type="function_call",
            call_id=start.id,
            name=start.name,
            arguments="",
            status="in_progress",
        )
        self.items.append(call)
        index = len(self.items) - 1
        return [self._event("response.output_item.added", output_index=index, item=call.model_copy())]

    def _add_text(self, text: str) -> ResponseEvent:
        message = self.items[-1]
        assert isinstance(message, OutputMessage)
        logprobs, self.logprobs = self.logprobs, []
        part = message.content[0]
        part.text += text
        part.logprobs += logprobs
        location = {**self._location, "content_index": 0}
        return self._event("response.output_text.delta", **location, delta=text, logprobs=logprobs)

    def _add_arguments(self, text: str) -> ResponseEvent:
        call = self.items[-1]
        assert isinstance(call, OutputCall)
        call.arguments += text
        return self._event("response.function_call_arguments.delta", **self._location, delta=text)

    def _end_item(self, status: Status) -> list[ResponseEvent]:
        """End the last item, if there is one."""
        if not self.items:
            return []
        item = self.items[-1]
        item.status = status
        if isinstance(item, OutputMessage):
            location, part = {**self._location, "content_index": 0}, item.content[0]
            part.logprobs += self.logprobs  # of tokens that had no text
            self.logprobs = []
            ends = [
                self._event("response.output_text.done", **location, text=part.text, logprobs=part.logprobs),
                self._event("response.content_part.done", **location, part=part),
            ]
        else:
            done = "response.function_call_arguments.done"
            ends = [self._event(done, **self._location, arguments=item.arguments)]
        return [*ends, self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)]

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self.id.removeprefix('resp_')}_{len(self.items)}"

    def _response(self, status: Status) -> Response:
        request, has_ended = self.responses_request, status != "in_progress"
        text_format = request.text.format if request.text else None
        choice = request.tool_choice or "auto"
        return Response(
            id=self.id,
            object="response",
            created_at=self.created,
            model=self.model,
            status=status,
            output=self.items if has_ended else [],
            usage=ResponseUsage.of(usage(self.choices, 1)) if has_ended else None,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=None,
            store=False,
            temperature=1.0 if request.temperature is None else request.temperature,
            text={
                "format": text_format.model_dump(by_alias=True, exclude_none=True) if text_format else {"type": "text"}
            },
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[{"strict": False, **tool.model_dump(exclude_none=True)} for tool in request.tools or []],
            top_p=1.0 if request.top_p is None else request.top_p,
            truncation="disabled",
        )
