"""/v1/chat/completions: its request, its body and chunks, and their writer."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.chat_template import ConversationRequest
from deployments.openai.choices import Choice, FinishReason, RequestMetrics, Usage
from deployments.openai.fields import WHOLE, ResponseModel, Text
from deployments.openai.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs_field
from deployments.openai.messages import ChatMessage
from deployments.openai.sampling_fields import GenerationRequest
from deployments.openai.structured_output import GrammarSource
from deployments.openai.tool_calls import (
    Arguments,
    CallReader,
    CallStart,
    FunctionCall,
    FunctionDelta,
    Piece,
    ToolCall,
    ToolCallDelta,
)
from deployments.openai.tools import ToolChoice, ToolForm, required_call
from deployments.openai.writer import Writer
from engine.errors import RequestError
from engine.sequence import RequestOutput


class ChatCompletionRequest(GenerationRequest, ConversationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """The conversation."""
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    """Tokens to generate at most; the newer name of max_tokens. Without either: all the room that is left."""
    logprobs: bool | None = None
    """Log probabilities of the target for each token."""
    top_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
    """Alternatives to list for each token; only with logprobs."""
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    """Text is all there is."""
    parallel_tool_calls: bool | None = None
    """Whether several calls may be required at once (the default)."""
    verbosity: Text | None = None
    """Accepted and ignored: no model here is trained for it."""

    def grammar_source(self, tool_form: ToolForm | None) -> GrammarSource | None:
        """Return what the answer must match: a required call, or what the client wrote.

        Args:
            tool_form: how this model calls tools, if it can.

        Raises:
            RequestError: two fields contradict one another, or `tool_choice` does not fit the tools.
        """
        is_parallel = self.parallel_tool_calls is not False
        call = required_call(self.tool_choice, self.tools, tool_form, is_parallel=is_parallel)
        source = self.text_source()
        if call is not None and source is not None:
            raise RequestError(f"tool_choice requires a call, which {source.field} does not allow", "tool_choice")
        return call or source


class AnswerMessage(ResponseModel):
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
    message: AnswerMessage
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
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics | None = None


class ChatCompletionChunk(ResponseModel):
    """One chunk of a chat completion's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class ChatWriter(Writer):
    """Writes the answers of a conversation; `tool_form` is how the model calls tools, if it can."""

    request: ChatCompletionRequest
    tool_form: ToolForm | None = None
    readers: dict[int, CallReader] = field(default_factory=dict, init=False)
    choices_with_calls: set[int] = field(default_factory=set, init=False)
    num_streamed_calls: Counter[int] = field(default_factory=Counter, init=False)

    def opening(self) -> list[ChatCompletionChunk]:
        """Return the chunk that says who speaks, one per choice."""
        delta = Delta(role="assistant", content="")
        return [
            self._chunk(
                ChatChunkChoice(index=choice.index, delta=delta, logprobs=None, finish_reason=None),
                **(self.prompt_ids_field(choice) if choice.index == 0 else {}),
            )
            for choice in self.choices
        ]

    def chunk(self, choice: Choice, output: RequestOutput) -> list[ChatCompletionChunk]:
        """Return the chunks with the next tokens of a choice: one for each piece of text or of a call, at least one."""
        logprobs = None
        if output.logprobs is not None:
            logprobs = chat_logprobs(output.token_ids, output.logprobs, self.decoder)
        pieces = self._read(choice, output.text, is_last=output.finish_reason is not None)
        deltas = [self._delta(choice, piece) for piece in pieces] or [Delta(content="")]
        # One piece in a chunk: clients join the deltas of a call by its index, and expect each index once in a chunk.
        chunks = [
            ChatChunkChoice(index=choice.index, delta=delta, logprobs=None, finish_reason=None) for delta in deltas
        ]
        chunks[0] = chunks[0].model_copy(update={"logprobs": logprobs, **self.token_ids_field(output.token_ids)})
        end = {"finish_reason": self._finish_reason(choice), "stop_reason": output.stop_reason}
        chunks[-1] = chunks[-1].model_copy(update=end)
        return [self._chunk(chunk) for chunk in chunks]

    def closing(self) -> list[ChatCompletionChunk]:
        """Return the chunk with the token counts and no choices, if the client asked for it."""
        if not self.has_usage_chunk:
            return []
        return [
            ChatCompletionChunk(**self.common_fields, object="chat.completion.chunk", choices=[], **self.usage_fields())
        ]

    def whole(self) -> ChatCompletion:
        """Return the body of a response that is not streamed."""
        choices = [
            ChatChoice(
                index=choice.index,
                message=self._message(choice),
                logprobs=chat_logprobs(choice.token_ids, choice.logprobs, self.decoder) if choice.logprobs else None,
                finish_reason=self._finish_reason(choice),
                stop_reason=choice.stop_reason,
                **self.token_ids_field(choice.token_ids),
            )
            for choice in self.choices
        ]
        return ChatCompletion(
            **self.common_fields,
            object="chat.completion",
            choices=choices,
            **self.prompt_ids_field(self.choices[0]),
            **prompt_logprobs_field(self.request, self.choices[0], self.decoder),
            **self.usage_fields(),
        )

    def _message(self, choice: Choice) -> AnswerMessage:
        text = ""
        calls: list[ToolCall] = []
        for piece in self._read(choice, choice.text, is_last=True):
            match piece:
                case CallStart():
                    function = FunctionCall(name=piece.name, arguments="")
                    calls.append(ToolCall(id=piece.id, type="function", function=function))
                case Arguments():
                    calls[-1].function.arguments += piece.text
                case _:
                    text += piece
        if not calls:
            return AnswerMessage(role="assistant", content=text)
        return AnswerMessage(role="assistant", content=text or None, tool_calls=calls)

    def _delta(self, choice: Choice, piece: Piece) -> Delta:
        match piece:
            case CallStart():
                function = FunctionDelta(name=piece.name, arguments="")
                self.num_streamed_calls[choice.index] += 1
                start = {"id": piece.id, "type": "function"}
            case Arguments():
                function, start = FunctionDelta(arguments=piece.text), {}
            case _:
                return Delta(content=piece)
        index = self.num_streamed_calls[choice.index] - 1
        return Delta(tool_calls=[ToolCallDelta(index=index, **start, function=function)])

    def _read(self, choice: Choice, text: str, *, is_last: bool) -> list[Piece]:
        """Split text into content and tool calls."""
        if not self.request.offered_tools or self.tool_form is None:
            return [text]
        if choice.index not in self.readers:
            self.readers[choice.index] = self.tool_form.reader()
        pieces = self.readers[choice.index].feed(text, is_last=is_last)
        if any(isinstance(piece, CallStart) for piece in pieces):
            self.choices_with_calls.add(choice.index)
        return pieces

    def _finish_reason(self, choice: Choice) -> FinishReason | None:
        """Return why an answer ended; OpenAI says `tool_calls`, but `stop` where the client named the function."""
        is_named = isinstance(self.request.tool_choice, ToolChoice)
        if choice.finish_reason == "stop" and choice.index in self.choices_with_calls and not is_named:
            return "tool_calls"
        return choice.finish_reason

    def _chunk(self, choice: ChatChunkChoice, **fields: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            **self.common_fields,
            object="chat.completion.chunk",
            choices=[choice],
            **self.chunk_usage_field(),
            **fields,
        )
