"""/v1/chat/completions: its request, its body and chunks, and their writer."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.conversation_fields import ConversationRequest, Messages
from deployments.openai.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs_field
from deployments.openai.sampling_fields import GenerationRequest
from deployments.openai.structured_output import GrammarSource
from deployments.openai.tool_calls import Arguments, CallReader, CallStart, FunctionCall, Piece, ToolCall
from deployments.openai.tools import ToolChoice, ToolForm, required_call
from deployments.openai.types import WHOLE, NumAlternatives, ResponseModel
from deployments.openai.writer import Choice, FinishReason, RequestMetrics, Round, Usage, Writer, event
from engine.protocols import RequestOutput


class ChatCompletionRequest(GenerationRequest, ConversationRequest):
    """The body of /v1/chat/completions."""

    messages: Messages
    """The conversation."""
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    """Tokens to generate at most; the newer name of max_tokens. Without either: all the room that is left."""
    logprobs: bool | None = None
    """Log probabilities of the target for each token."""
    top_logprobs: NumAlternatives | None = None
    """Alternatives to list for each token; only with logprobs."""
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    """Text is all there is."""
    parallel_tool_calls: bool | None = None
    """Whether several calls may be required at once (the default)."""
    verbosity: str | None = None
    """Accepted and ignored: no model here is trained for it."""

    def grammar_source(self, tool_form: ToolForm | None) -> GrammarSource | None:
        """Return the grammar of a required call in `tool_form`, or else the client's own constraint.

        Raises RequestError if `tool_choice` does not fit the tools, or two fields constrain the text.
        """
        source = self.text_source()
        is_parallel = self.parallel_tool_calls is not False
        return required_call(self.tool_choice, self.tools, tool_form, is_parallel=is_parallel) or source

    def call_reader(self, tool_form: ToolForm | None) -> CallReader | None:
        """Return a reader of the answer; None if it cannot hold calls."""
        if not self.offered_tools or tool_form is None:
            return None
        return tool_form.reader(calls_only=self.tool_choice not in (None, "auto"))


class AnswerMessage(ResponseModel):
    """The whole answer; its content is null if it only calls."""

    role: Literal["assistant"]
    content: str | None
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


@dataclass(slots=True)
class ChatWriter(Writer):
    """Writes chat completions; `tool_form` is how the model writes calls, if it can."""

    request: ChatCompletionRequest
    tool_form: ToolForm | None = None
    readers: dict[int, CallReader | None] = field(default_factory=dict, init=False)
    num_calls: Counter[int] = field(default_factory=Counter, init=False)
    """Calls that have begun, by choice."""
    num_read: Counter[int] = field(default_factory=Counter, init=False)
    """Calls whose names have been read, by choice."""

    def opening(self) -> str:
        """Return the chunk that says who speaks, one per choice."""
        delta = {"role": "assistant", "content": ""}
        prompt = self.ids_field(prompt_token_ids=self.choices[0].prompt_token_ids)
        return "".join(
            self._event([_chunk(choice, delta)], **self.chunk_usage_field(), **({} if choice.index else prompt))
            for choice in self.choices
        )

    def chunk(self, choice: Choice, output: RequestOutput) -> str:
        """Return the chunks with the next tokens of a choice: one for each piece of text or of a call, at least one."""
        logprobs = None
        if output.logprobs is not None:
            logprobs = chat_logprobs(output.token_ids, output.logprobs, self.reply.token_texts)
        pieces = self.read(choice, output.text, is_last=output.finish_reason is not None)
        # One piece in a chunk: clients join the deltas of a call by its index, and expect each index once in a chunk.
        deltas = [self._delta(choice, piece) for piece in pieces] or [{"content": ""}]
        chunks = [_chunk(choice, delta) for delta in deltas]
        chunks[0]["logprobs"] = logprobs
        chunks[-1] |= {"finish_reason": self._finish_reason(choice), "stop_reason": output.stop_reason}
        chunks[0] |= self.ids_field(token_ids=output.token_ids) | self.rounds_field(choice)
        return "".join(self._event([chunk], **self.chunk_usage_field()) for chunk in chunks)

    def closing(self) -> str:
        """Return the chunk with the token counts and no choices, if the client asked for it."""
        if not self.has_usage_chunk:
            return ""
        usage = {name: figures.model_dump(exclude_unset=True) for name, figures in self.usage_fields().items()}
        return self._event([], **usage)

    def whole(self) -> ResponseModel:
        """Return the body of a response that is not streamed."""
        choices = [
            ChatChoice(
                index=choice.index,
                message=self._message(choice),
                logprobs=chat_logprobs(choice.token_ids, choice.logprobs, self.reply.token_texts)
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
            **prompt_logprobs_field(self.request.prompt_logprobs, self.choices[0], self.reply.token_texts),
            **self.usage_fields(),
        )

    def read(self, choice: Choice, text: str, *, is_last: bool) -> list[Piece]:
        """Return the pieces of text and calls that the next text of a choice completes."""
        if choice.index not in self.readers:
            self.readers[choice.index] = self.request.call_reader(self.tool_form)
        reader = self.readers[choice.index]
        if reader is None:
            return [text]
        pieces = reader.feed(text, is_last=is_last)
        return [self._with_id(piece, choice) if isinstance(piece, CallStart) else piece for piece in pieces]

    def _with_id(self, call: CallStart, choice: Choice) -> CallStart:
        """Return a choice's next call with its id, which is the same where a stream is continued."""
        self.num_read[choice.index] += 1
        basis = f"{self.reply.id}/{choice.index}/{self.num_read[choice.index]}"
        return replace(call, id=f"call_{hashlib.blake2s(basis.encode(), digest_size=12).hexdigest()}")

    def _message(self, choice: Choice) -> AnswerMessage:
        text = ""
        calls: list[ToolCall] = []
        for piece in self.read(choice, choice.text, is_last=True):
            match piece:
                case CallStart():
                    function = FunctionCall(name=piece.name, arguments="")
                    calls.append(ToolCall(id=piece.id, type="function", function=function))
                case Arguments():
                    calls[-1].function.arguments += piece.text
                case _:
                    text += piece
        self.num_calls[choice.index] = len(calls)
        if not calls:
            return AnswerMessage(role="assistant", content=text)
        return AnswerMessage(role="assistant", content=text or None, tool_calls=calls)

    def _delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the next piece of an answer; only the first piece of a call has its id, type and name."""
        match piece:
            case CallStart():
                self.num_calls[choice.index] += 1
                call = {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
            case Arguments():
                call = {"function": {"arguments": piece.text}}
            case _:
                return {"content": piece}
        return {"tool_calls": [{"index": self.num_calls[choice.index] - 1, **call}]}

    def _finish_reason(self, choice: Choice) -> FinishReason | None:
        """Return why an answer ended: `tool_calls`, but `stop` where the client named the function, as OpenAI does."""
        is_named = isinstance(self.request.tool_choice, ToolChoice)
        if choice.finish_reason == "stop" and self.num_calls[choice.index] and not is_named:
            return "tool_calls"
        return choice.finish_reason

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        return event({**self.common_fields("chat.completion.chunk"), "choices": choices, **fields})


def _chunk(choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
