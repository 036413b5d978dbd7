"""ChatWriter: from the rounds of a request to the bodies and chunks of /v1/chat/completions, tool calls included."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments import responses as r
from deployments.choices import Choice
from deployments.requests import ChatCompletionRequest
from deployments.tools import Call, CallReader
from deployments.writing import Writer
from engine.draft import TokenLogprobs
from engine.sequence import RequestOutput


@dataclass(slots=True)
class ChatWriter(Writer):
    """Writes the answers of a conversation."""

    readers: dict[int, CallReader] = field(default_factory=dict)
    num_calls: Counter[int] = field(default_factory=Counter)

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
        """Return the chunk of one round of one choice."""
        logprobs = self._logprobs(output.token_ids, output.logprobs) if output.logprobs is not None else None
        text, calls = self._read(choice, output.text, is_last=output.finish_reason is not None)
        delta = r.Delta(content=text)
        if calls:
            first = self.num_calls[choice.index] - len(calls)
            placed = [call.model_copy(update={"index": i}) for i, call in enumerate(calls, start=first)]
            delta = r.Delta(**({"content": text} if text else {}), tool_calls=placed)
        piece = r.ChatChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=self._finish_reason(choice),
            stop_reason=output.stop_reason,
            **self.ids(output.token_ids),
        )
        return [self._chunk(piece)]

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
        text, calls = self._read(choice, choice.text, is_last=True)
        if not calls:
            return r.AssistantMessage(role="assistant", content=text)
        return r.AssistantMessage(role="assistant", content=text or None, tool_calls=calls)

    def _read(self, choice: Choice, text: str, *, is_last: bool) -> tuple[str, list[r.ToolCall]]:
        """Return what of a piece of text is text, and the calls that are complete with it."""
        request, form = self.request, self.encoder.tool_form
        if not isinstance(request, ChatCompletionRequest) or not request.offered_tools or form is None:
            return text, []
        if choice.index not in self.readers:
            self.readers[choice.index] = form.reader()
        pieces = self.readers[choice.index].feed(text, is_last=is_last)
        calls = [
            r.ToolCall(id=call.id, type="function", function=r.FunctionCall(name=call.name, arguments=call.arguments))
            for call in pieces
            if isinstance(call, Call)
        ]
        self.num_calls[choice.index] += len(calls)
        return "".join(piece for piece in pieces if isinstance(piece, str)), calls

    def _finish_reason(self, choice: Choice) -> r.FinishReason | None:
        if choice.finish_reason == "stop" and self.num_calls[choice.index]:
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
