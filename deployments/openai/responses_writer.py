"""/v1/responses: its body, its events, and ResponsesWriter, which turns a chat completion into them."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, Literal

from pydantic import Field

from deployments.openai.chat import ChatWriter
from deployments.openai.logprobs import TokenLogprob, chat_logprobs
from deployments.openai.message_parts import CallArguments, CallStart, Content, Part, Reasoning
from deployments.openai.responses_request import ResponsesRequest
from deployments.openai.tools import THOUGHTS
from deployments.openai.types import ResponseModel, to_json
from deployments.openai.writer import Choice
from engine.requests.output import RequestOutput

Status = Literal["in_progress", "completed", "incomplete"]


class OutputPart(ResponseModel):
    """The text of a message, or of thoughts."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[str] = Field(default=[])
    logprobs: list[TokenLogprob] = Field(default=[])


class OutputItem(ResponseModel):
    """A message, a call of a function, or thoughts; these come whole, so there is no summary."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    role: Literal["assistant"] = "assistant"
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    summary: list[str] = Field(default=[])
    status: Status
    content: list[OutputPart] = Field(default=[])


class ResponseUsage(ResponseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


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
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
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


@dataclass(slots=True, kw_only=True)
class ResponsesWriter(ChatWriter):
    """Writes one response as items: thoughts, messages, calls. Only the last item can be in progress."""

    END: ClassVar[str] = ""
    REPEATS_ALL: ClassVar[bool] = True

    responses_request: ResponsesRequest
    items: list[OutputItem] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, init=False)  # of tokens whose text has not come yet

    def opening(self) -> str:
        response = self._response("in_progress")
        return "".join(self._named_event(f"response.{name}", response=response) for name in ("created", "in_progress"))

    def chunk(self, choice: Choice, output: RequestOutput) -> str:
        return self._add(choice, output, is_last=output.finish_reason is not None)

    def closing(self) -> str:
        return self._finish() + self._named_event(f"response.{self._status}", response=self._response(self._status))

    def failed(self, body: dict[str, Any]) -> str:
        error = body["error"]
        return self._named_event("error", message=error["message"], param=error["param"], code=error["code"])

    def whole(self) -> ResponseModel:
        self._add(self.choices[0], self.choices[0], is_last=True)
        self._finish()
        return self._response(self._status)

    @property
    def _status(self) -> Status:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    @property
    def _location(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}

    def _named_event(self, type: str, **fields: Any) -> str:
        if not self.request.stream:
            return ""
        self.num_events += 1
        return f"event: {type}\ndata: {to_json({'type': type, 'sequence_number': self.num_events - 1, **fields})}\n\n"

    def _add(self, choice: Choice, tokens: Choice | RequestOutput, *, is_last: bool) -> str:
        if tokens.logprobs:
            self.logprobs += chat_logprobs(tokens.token_ids, tokens.logprobs, self.reply.token_bytes).content
        return "".join(self._add_part(part) for part in self.read(choice, tokens.text, is_last=is_last))

    def _add_part(self, part: Part) -> str:
        last_type = self.items[-1].type if self.items else None
        match part:
            case CallStart():
                return self._begin("function_call", "fc", call_id=part.id, name=part.name, arguments="")
            case CallArguments():
                self.items[-1].arguments += part.text
                return self._named_event("response.function_call_arguments.delta", **self._location, delta=part.text)
            case Reasoning() if last_type != "reasoning":
                begun = self._begin("reasoning", "rs", OutputPart(type="reasoning_text", text=""), summary=[])
            case Content() if last_type != "message":
                begun = self._begin_message()
            case _:
                begun = ""
        return begun + self._add_text(part.text)

    def _begin_message(self) -> str:
        num_thoughts = self._num_thoughts(lambda: [token.token for token in self.logprobs])
        self.logprobs = self.logprobs[num_thoughts:]
        text = OutputPart(type="output_text", text="", annotations=[], logprobs=[])
        return self._begin("message", "msg", text, role="assistant")

    def _begin(self, type: Any, prefix: str, text: OutputPart | None = None, **fields: Any) -> str:
        ended = self._end_item("completed")
        id = f"{prefix}_{self.reply.id.removeprefix('resp_')}_{len(self.items)}"
        item = OutputItem(id=id, type=type, status="in_progress", **fields, **({"content": []} if text else {}))
        self.items.append(item)
        begun = ended + self._named_event("response.output_item.added", item=item, output_index=len(self.items) - 1)
        if text is None:
            return begun
        item.content = [text]
        return begun + self._named_event("response.content_part.added", part=text, **self._location, content_index=0)

    def _num_thoughts(self, texts_of: Callable[[], Sequence[str]]) -> int:
        """Return how many of the first tokens are thoughts or their marks; `texts_of` returns each token's text."""
        if self.form is None or not any(item.type == "reasoning" for item in self.items):
            return 0
        fields, texts = self.form.loaded.fields, texts_of()
        closing = next(fields[name].close_re for name in THOUGHTS if name in fields)
        closed = closing.search("".join(texts)) if closing else None
        return bisect_left(list(accumulate(map(len, texts))), closed.end()) + 1 if closed else len(texts)

    def _add_text(self, text: str) -> str:
        part = self.items[-1].content[0]
        part.text += text
        fields = {**self._location, "content_index": 0, "delta": text}
        if part.type == "output_text":
            fields["logprobs"], self.logprobs = self.logprobs, []
            part.logprobs += fields["logprobs"]
        return self._named_event(f"response.{part.type}.delta", **fields)

    def _finish(self) -> str:
        start = "" if self.items else self._begin_message()
        return start + self._end_item(self._status)

    def _end_item(self, status: Status) -> str:
        if not self.items:
            return ""
        item = self.items[-1]
        item.status = status
        if item.type == "function_call":
            done = "response.function_call_arguments.done"
            ends = self._named_event(done, **self._location, arguments=item.arguments)
        else:
            location, part, scores = {**self._location, "content_index": 0}, item.content[0], {}
            if part.type == "output_text":
                part.logprobs += self.logprobs  # of tokens that had no text
                self.logprobs, scores = [], {"logprobs": part.logprobs}
            ends = self._named_event(f"response.{part.type}.done", **location, text=part.text, **scores)
            ends += self._named_event("response.content_part.done", part=part, **location)
        return ends + self._named_event("response.output_item.done", item=item, output_index=len(self.items) - 1)

    def _response(self, status: Status) -> Response:
        request, has_ended, usage = self.responses_request, status != "in_progress", self.usage()
        text_format: dict[str, Any] = {"type": "text"}
        if request.text and request.text.format:
            shown = request.text.format
            text_format = {"type": shown.type, **shown.model_dump(by_alias=True, exclude_none=True)}
        choice, tools = request.tool_choice or "auto", request.tools or []
        num_thoughts = self._num_thoughts(lambda: self.reply.token_bytes.texts(self.choices[0].token_ids))
        response_usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=usage.prompt_tokens_details,
            output_tokens=usage.completion_tokens,
            output_tokens_details={"reasoning_tokens": num_thoughts},
            total_tokens=usage.total_tokens,
        )
        return Response(
            id=self.reply.id,
            object="response",
            created_at=self.reply.created,
            model=self.reply.model,
            status=status,
            output=self.items if has_ended else [],
            usage=response_usage if has_ended else None,
            error=None,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=None,
            store=False,
            temperature=1.0 if request.temperature is None else request.temperature,
            text={"format": text_format},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[{"strict": False, **tool.model_dump(exclude_none=True)} for tool in tools],
            top_p=1.0 if request.top_p is None else request.top_p,
            truncation="disabled",
        )
