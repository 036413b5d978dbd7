"""ResponsesWriter: from the rounds of a request to the body and the events of /v1/responses."""

from dataclasses import dataclass, field
from typing import Any

from deployments.openai.bodies import ResponseModel
from deployments.openai.choices import Choice, usage
from deployments.openai.responses import (
    IncompleteDetails,
    OutputMessage,
    OutputText,
    Response,
    ResponseEvent,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from deployments.openai.writer import Writer
from engine.sequence import RequestOutput


@dataclass(slots=True, kw_only=True)
class ResponsesWriter(Writer):
    """Writes one answer with one message with one text."""

    asked: ResponsesRequest
    num_events: int = field(default=0, init=False)

    def opening(self) -> list[ResponseModel]:
        """Return the events before the first tokens."""
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
            self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
            self._event("response.content_part.added", **self._place, part=_part("")),
        ]

    def chunk(self, choice: Choice, output: RequestOutput) -> list[ResponseModel]:
        """Return the event of a delivery; none, if it brought no text yet."""
        if not output.text:
            return []
        return [self._event("response.output_text.delta", **self._place, delta=output.text, logprobs=[])]

    def closing(self) -> list[ResponseModel]:
        """Return the events after the last tokens."""
        text, status = self.choices[0].text, self._status
        part = _part(text)
        return [
            self._event("response.output_text.done", **self._place, text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=part),
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
    def _place(self) -> dict[str, Any]:
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
        asked, has_ended = self.asked, status != "in_progress"
        form = asked.text.format if asked.text else None
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
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            parallel_tool_calls=bool(asked.parallel_tool_calls),
            previous_response_id=None,
            store=False,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            text={"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            tool_choice="none",
            tools=[],
            top_p=1.0 if asked.top_p is None else asked.top_p,
            truncation="disabled",
        )


def _part(text: str) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])
