"""ChatWriter: from the rounds of a request to the bodies and chunks of /v1/chat/completions, tool calls included."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.openai import bodies as r
from deployments.openai.call_reader import Arguments, CallReader, CallStart, Piece
from deployments.openai.choices import Choice
from deployments.openai.requests import ChatCompletionRequest
from deployments.openai.tools import ToolChoice
from deployments.openai.writer import Writer
from engine.protocols import TokenLogprobs
from engine.sequence import RequestOutput


@dataclass(slots=True)
class ChatWriter(Writer):
    """Writes the answers of a conversation."""

    readers: dict[int, CallReader] = field(default_factory=dict)
    callers: set[int] = field(default_factory=set)
    num_streamed: Counter[int] = field(default_factory=Counter)

    def opening(self) -> list[r.ResponseModel]:
        """Return the chunk that says who speaks, one per choice."""
        return [
            self._chunk(
                r.ChatChunkChoice(
                    index=choice.index,
                    delta=r.Delta(role="assistant", content=""),
                    logprobs=None,
                    finish_reason=None,
                ),
                **(self.prompt_ids(choice) if choice.index == 0 else {}),
            )
            for choice in self.choices
        ]

    def chunk(self, choice: Choice, output: RequestOutput) -> list[r.ResponseModel]:
        """Return the chunks of what one choice was delivered: one, or one for each piece of text or of a call."""
        logprobs = self._logprobs(output.token_ids, output.logprobs) if output.logprobs is not None else None
        pieces = self._read(choice, output.text, is_last=output.finish_reason is not None)
        deltas = [self._delta(choice, piece) for piece in pieces] or [r.Delta(content="")]
        # A piece each, because clients put the deltas of a call together by its index, and expect it once in a chunk.
        written = [
            r.ChatChunkChoice(index=choice.index, delta=delta, logprobs=None, finish_reason=None) for delta in deltas
        ]
        written[0] = written[0].model_copy(update={"logprobs": logprobs, **self.ids(output.token_ids)})
        end = {"finish_reason": self._finish_reason(choice), "stop_reason": output.stop_reason}
        written[-1] = written[-1].model_copy(update=end)
        return [self._chunk(piece) for piece in written]

    def closing(self) -> list[r.ResponseModel]:
        """Return the chunk with the usage and no choices, if it is wanted."""
        if not self.wants_usage:
            return []
        return [r.ChatCompletionChunk(**self.common, object="chat.completion.chunk", choices=[], **self.figures())]

    def whole(self) -> r.ResponseModel:
        """Return the body of a response that was not streamed."""
        choices = [
            r.ChatChoice(
                index=choice.index,
                message=self._message(choice),
                logprobs=self._logprobs(choice.token_ids, choice.logprobs) if choice.logprobs else None,
                finish_reason=self._finish_reason(choice),
                stop_reason=choice.stop_reason,
                **self.ids(choice.token_ids),
            )
            for choice in self.choices
        ]
        return r.ChatCompletion(
            **self.common,
            object="chat.completion",
            choices=choices,
            **self.prompt_ids(self.choices[0]),
            **self.figures(),
        )

    def _message(self, choice: Choice) -> r.AssistantMessage:
        text = ""
        calls: list[r.ToolCall] = []
        for piece in self._read(choice, choice.text, is_last=True):
            match piece:
                case CallStart():
                    function = r.FunctionCall(name=piece.name, arguments="")
                    calls.append(r.ToolCall(id=piece.id, type="function", function=function))
                case Arguments():
                    calls[-1].function.arguments += piece.text
                case _:
                    text += piece
        if not calls:
            return r.AssistantMessage(role="assistant", content=text)
        return r.AssistantMessage(role="assistant", content=text or None, tool_calls=calls)

    def _delta(self, choice: Choice, piece: Piece) -> r.Delta:
        match piece:
            case CallStart():
                function = r.FunctionDelta(name=piece.name, arguments="")
                self.num_streamed[choice.index] += 1
                begin = {"id": piece.id, "type": "function"}
            case Arguments():
                function, begin = r.FunctionDelta(arguments=piece.text), {}
            case _:
                return r.Delta(content=piece)
        index = self.num_streamed[choice.index] - 1
        return r.Delta(tool_calls=[r.ToolCallDelta(index=index, **begin, function=function)])

    def _read(self, choice: Choice, text: str, *, is_last: bool) -> list[Piece]:
        """Return what of a piece of text is content, and what is of calls."""
        request, form = self.request, self.encoder.tool_form
        if not isinstance(request, ChatCompletionRequest) or not request.offered_tools or form is None:
            return [text]
        if choice.index not in self.readers:
            self.readers[choice.index] = form.reader()
        pieces = self.readers[choice.index].feed(text, is_last=is_last)
        if any(isinstance(piece, CallStart) for piece in pieces):
            self.callers.add(choice.index)
        return pieces

    def _finish_reason(self, choice: Choice) -> r.FinishReason | None:
        """Return why an answer ended, as OpenAI names it: a call that was asked for by name is no news."""
        assert isinstance(self.request, ChatCompletionRequest)
        is_named = isinstance(self.request.tool_choice, ToolChoice)
        if choice.finish_reason == "stop" and choice.index in self.callers and not is_named:
            return "tool_calls"
        return choice.finish_reason

    def _chunk(self, choice: r.ChatChunkChoice, **extra: Any) -> r.ChatCompletionChunk:
        return r.ChatCompletionChunk(
            **self.common,
            object="chat.completion.chunk",
            choices=[choice],
            **self.chunk_usage(),
            **extra,
        )

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> r.ChatLogprobs:
        texts = self.encoder.token_texts(token_ids)
        return r.ChatLogprobs(
            content=[
                r.TokenLogprob(
                    **_alternative(text, position.logprob),
                    top_logprobs=[
                        r.TopLogprob(**_alternative(top, logprob))
                        for top, logprob in zip(
                            self.encoder.token_texts(position.top_ids), position.top_logprobs, strict=True
                        )
                    ],
                )
                for text, position in zip(texts, logprobs, strict=True)
            ]
        )


def _alternative(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
