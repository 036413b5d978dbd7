"""/v1/messages: its body, its events, and MessagesWriter, which turns a chat completion into them."""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from deployments.openai.chat import ChatWriter
from deployments.openai.message_parts import CallArguments, CallStart, Part, Reasoning
from deployments.openai.types import ResponseModel, to_json
from deployments.openai.writer import Choice
from deployments.prompts.conversation import past_arguments
from engine.requests.output import RequestOutput

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Block(ResponseModel):
    """Text; thoughts, which nobody signs; or a call, whose input is text if the model wrote no JSON object."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] | str = ""


class MessageBody(ResponseModel):
    """The body of a response."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: dict[Literal["input_tokens", "cache_read_input_tokens", "output_tokens"], int]
    """Input tokens do not count cached tokens."""


class InputTokens(ResponseModel):
    """The body of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesError(ResponseModel):
    """The body of every error on these routes."""

    type: Literal["error"]
    error: dict[Literal["type", "message"], str]
    request_id: str | None = None


@dataclass(slots=True)
class MessagesWriter(ChatWriter):
    """Writes one response as blocks: thoughts, text and calls. The last block stays open until the next begins."""

    END: ClassVar[str] = ""

    blocks: list[Block] = field(default_factory=list, init=False)
    arguments: str = field(default="", init=False)  # of the last call

    def opening(self) -> str:
        """Return the event before the first tokens; its usage does not know yet which tokens were cached."""
        return self._named_event("message_start", message=self._body())

    def chunk(self, choice: Choice, output: RequestOutput) -> str:
        return self._add(choice, output.text, is_last=output.finish_reason is not None)

    def closing(self) -> str:
        end, message = self._end_block(), self._body()
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        end += self._named_event("message_delta", delta=delta, usage=message.usage)
        return end + self._named_event("message_stop")

    def failed(self, body: dict[str, Any]) -> str:
        return self._named_event(**body)

    def whole(self) -> ResponseModel:
        self._add(self.choices[0], self.choices[0].text, is_last=True)
        self._end_block()
        return self._body()

    def _named_event(self, type: str, **fields: Any) -> str:
        return f"event: {type}\ndata: {to_json({'type': type, **fields})}\n\n"

    def _add(self, choice: Choice, text: str, *, is_last: bool) -> str:
        return "".join(self._add_part(part) for part in self.read(choice, text, is_last=is_last))

    def _add_part(self, part: Part) -> str:
        match part:
            case CallStart():
                return self._begin_block(Block(type="tool_use", id=part.id, name=part.name, input={}))
            case CallArguments():
                self.arguments += part.text
                is_json = self.request.tool_choice not in (None, "auto")  # by a grammar
                return self._block_delta(type="input_json_delta", partial_json=part.text) if is_json else ""
            case Reasoning():
                begun = self._begin_unless_last(Block(type="thinking", thinking="", signature=""))
                self.blocks[-1].thinking += part.text
                return begun + self._block_delta(type="thinking_delta", thinking=part.text)
        begun = self._begin_unless_last(Block(type="text", text=""))
        self.blocks[-1].text += part.text
        return begun + self._block_delta(type="text_delta", text=part.text)

    def _begin_unless_last(self, empty: Block) -> str:
        return "" if self.blocks and self.blocks[-1].type == empty.type else self._begin_block(empty)

    def _begin_block(self, block: Block) -> str:
        end = self._end_block()
        self.blocks.append(block)
        return end + self._named_event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def _block_delta(self, **delta: str) -> str:
        return self._named_event("content_block_delta", index=len(self.blocks) - 1, delta=delta)

    def _end_block(self) -> str:
        if not self.blocks:
            return ""
        input_delta = ""
        if (last := self.blocks[-1]).type == "tool_use":
            text, self.arguments = self.arguments, ""
            last.input = past_arguments(text)
            if self.request.tool_choice in (None, "auto"):  # whole, because Anthropic's client fails at wrong JSON
                partial = text if isinstance(last.input, dict) else json.dumps(text)
                input_delta = self._block_delta(type="input_json_delta", partial_json=partial)
        return input_delta + self._named_event("content_block_stop", index=len(self.blocks) - 1)

    def _body(self) -> MessageBody:
        choice, usage = self.choices[0], self.usage()
        stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        has_calls = any(block.type == "tool_use" for block in self.blocks)
        reason: StopReason | None = "tool_use" if has_calls else "end_turn" if stop is None else "stop_sequence"
        if choice.finish_reason != "stop":
            reason = "max_tokens" if choice.finish_reason else None
        num_cached = usage.prompt_tokens_details["cached_tokens"]
        return MessageBody(
            id=self.reply.id,
            type="message",
            role="assistant",
            model=self.reply.model,
            content=self.blocks,
            stop_reason=reason,
            stop_sequence=stop,
            usage={
                "input_tokens": usage.prompt_tokens - num_cached,
                "cache_read_input_tokens": num_cached,
                "output_tokens": usage.completion_tokens,
            },
        )
