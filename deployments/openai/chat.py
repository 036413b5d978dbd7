"""/v1/chat/completions: its request, its body and chunks, and their writer."""

from dataclasses import dataclass, field
from typing import Any, Literal

from deployments.openai.conversation_fields import ConversationRequest, Messages
from deployments.openai.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs_field
from deployments.openai.message_parts import CallArguments, CallStart, Content, MessageParser, Part, Reasoning
from deployments.openai.sampling_fields import GenerationRequest
from deployments.openai.structured_output import GrammarSource
from deployments.openai.tools import MessageForm, ToolChoice, ToolForm, required_call
from deployments.openai.types import NumAlternatives, ResponseModel
from deployments.openai.writer import Choice, FinishReason, RequestMetrics, Round, Usage, Writer, event
from engine.requests.output import RequestOutput


class ChatCompletionRequest(GenerationRequest, ConversationRequest):
    """The body of /v1/chat/completions."""

    messages: Messages
    """The conversation."""
    logprobs: bool | None = None
    """Log probabilities of the target for each token."""
    top_logprobs: NumAlternatives | None = None
    """Alternatives to list for each token; only with logprobs."""
    parallel_tool_calls: bool | None = None
    """Whether several calls may be required at once (the default)."""

    def to_chat(self) -> "ChatCompletionRequest":
        return self

    def grammar_source(self, tool_form: ToolForm | None) -> GrammarSource | None:
        """Return the grammar of a required call, or the client's constraint; raise RequestError if they conflict."""
        source = self.text_source()
        is_parallel = self.parallel_tool_calls is not False
        return required_call(self.tool_choice, self.tools, tool_form, is_parallel=is_parallel) or source


class FunctionCall(ResponseModel):
    """A function's name and its arguments, as JSON text."""

    name: str
    arguments: str


class ToolCall(ResponseModel):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(ResponseModel):
    """The whole answer; its content is null if it only calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ResponseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    rounds: list[Round] | None = None


class ChatCompletion(ResponseModel):
    """The body of a chat completion; a stream's chunks have the same fields, with a `delta` in place of the message."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics | None = None
    record: dict[str, Any] | None = None


@dataclass(slots=True)
class ChatWriter(Writer):
    """Writes chat completions; `form` is how the model writes messages, if that is known."""

    request: ChatCompletionRequest
    form: MessageForm | None = None
    prompt_end: str = ""  # may hold the beginning of the answer
    parsers: dict[int, MessageParser] = field(default_factory=dict, init=False)

    def opening(self) -> str:
        delta = {"role": "assistant", "content": ""}
        prompt = self.ids_field(prompt_token_ids=self.choices[0].prompt_token_ids)
        return "".join(
            self._event([_chunk(choice, delta)], **self.chunk_usage_field(), **({} if choice.index else prompt))
            for choice in self.choices
        )

    def chunk(self, choice: Choice, output: RequestOutput) -> str:
        logprobs = None
        if output.logprobs is not None:
            logprobs = chat_logprobs(output.token_ids, output.logprobs, self.reply.token_bytes)
        parts = self.read(choice, output.text, is_last=output.finish_reason is not None)
        # One part in a chunk: clients join the deltas of a call by its index, and expect each index once in a chunk.
        deltas = [_delta(part) for part in parts] or [{"content": ""}]
        chunks = [_chunk(choice, delta) for delta in deltas]
        chunks[0]["logprobs"] = logprobs
        chunks[-1] |= {"finish_reason": self._finish_reason(choice), "stop_reason": output.stop_reason}
        chunks[0] |= self.ids_field(token_ids=output.token_ids)
        for chunk in chunks:
            chunk |= self.rounds_field(choice)  # the first chunk gets them all
        return "".join(self._event([chunk], **self.chunk_usage_field()) for chunk in chunks)

    def closing(self) -> str:
        if not self.has_usage_chunk:
            return ""
        return self._event([], **self.usage_fields())

    def whole(self) -> ResponseModel:
        choices = [
            ChatChoice(
                index=choice.index,
                message=self._message(choice),
                logprobs=chat_logprobs(choice.token_ids, choice.logprobs, self.reply.token_bytes)
                if choice.logprobs
                else None,
                finish_reason=self._finish_reason(choice),
                stop_reason=choice.stop_reason,
                **self.ids_field(token_ids=choice.token_ids),
                **self.rounds_field(choice),
            )
            for choice in self.choices
        ]
        return ChatCompletion(
            **self.common_fields("chat.completion"),
            choices=choices,
            **self.ids_field(prompt_token_ids=self.choices[0].prompt_token_ids),
            **prompt_logprobs_field(self.request.prompt_logprobs, self.choices[0], self.reply.token_bytes),
            **self.usage_fields(),
        )

    def read(self, choice: Choice, text: str, *, is_last: bool) -> list[Part]:
        """Return the parts of the message that the next text of a choice completes."""
        if self.form is None:
            return [Content(text)] if text else []
        if choice.index not in self.parsers:
            self.parsers[choice.index] = MessageParser(
                self.form,
                prompt=self.prompt_end,
                tools=self.request.offered_tools,
                calls_only=self.request.tool_choice not in (None, "auto", "none"),
                id_basis=f"{self.reply.id}/{choice.index}",  # the same where a stream is continued
            )
        return self.parsers[choice.index].feed(text, is_last=is_last)

    def _message(self, choice: Choice) -> AnswerMessage:
        texts: dict[type[Part], str] = {Content: "", Reasoning: ""}
        calls: list[ToolCall] = []
        for part in self.read(choice, choice.text, is_last=True):
            match part:
                case CallStart():
                    function = FunctionCall(name=part.name, arguments="")
                    calls.append(ToolCall(id=part.id, type="function", function=function))
                case CallArguments():
                    calls[part.index].function.arguments += part.text
                case _:
                    texts[type(part)] += part.text
        fields: dict[str, Any] = {"reasoning_content": texts[Reasoning]} if texts[Reasoning] else {}
        if calls:
            fields["tool_calls"] = calls
        return AnswerMessage(role="assistant", content=texts[Content] or (None if calls else ""), **fields)

    def _finish_reason(self, choice: Choice) -> FinishReason | None:
        """Return `tool_calls` after a call, but `stop` if the client named the function, as OpenAI does."""
        has_calls = choice.index in self.parsers and self.parsers[choice.index].num_calls
        is_named = isinstance(self.request.tool_choice, ToolChoice)
        return "tool_calls" if choice.finish_reason == "stop" and has_calls and not is_named else choice.finish_reason

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        return event({**self.common_fields("chat.completion.chunk"), "choices": choices, **fields})


def _chunk(choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case CallStart():
            call = {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
        case CallArguments():
            call = {"function": {"arguments": part.text}}
        case Reasoning():
            return {"reasoning_content": part.text}
        case _:
            return {"content": part.text}
    return {"tool_calls": [{"index": part.index, **call}]}
