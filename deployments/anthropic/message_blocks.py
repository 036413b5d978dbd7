"""The messages of a request in Anthropic's form, their blocks, and the chat messages they become."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.conversation_fields import (
    AssistantMessage,
    ChatMessage,
    Content,
    TextPart,
    ToolMessage,
    message_of,
)
from deployments.openai.tools import PastCall, PastFunction
from deployments.openai.types import JsonObject, RequestModel


class ToolResultBlock(RequestModel):
    """The result of a call; other results than text are refused, such as images."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Content | None = None


class ToolUseBlock(RequestModel):
    """A call in an earlier answer; its input is text if the model wrote no JSON object."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject | str


class ThinkingBlock(RequestModel):
    """Thoughts before an earlier answer, for chat templates that show them."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class InputTurn(RequestModel):
    """What the user says, and the results of calls; or, if the chat template allows it, another system message."""

    role: Literal["user", "system"]
    content: (
        str | Annotated[list[Annotated[TextPart | ToolResultBlock, Field(discriminator="type")]], Field(min_length=1)]
    )


class AnswerTurn(RequestModel):
    """An earlier answer, as it came; as the last message, the beginning of the answer, which continues it."""

    role: Literal["assistant"]
    content: str | list[Annotated[TextPart | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]]


Turn = Annotated[InputTurn | AnswerTurn, Field(discriminator="role")]


def conversation(turns: Sequence[InputTurn | AnswerTurn]) -> list[ChatMessage]:
    """Return chat messages: a tool message for each result of a call, and a message of all text between results."""
    messages: list[ChatMessage] = []
    for turn in turns:
        if isinstance(turn.content, str):
            messages.append(message_of(turn.role, turn.content))
        elif isinstance(turn, AnswerTurn):
            messages.append(_answer(turn.content))
        else:
            for block_type, run in groupby(turn.content, type):
                blocks: list[Any] = list(run)
                if block_type is TextPart:
                    messages.append(message_of(turn.role, blocks))
                    continue
                for block in blocks:
                    content = block.content or ""
                    messages.append(ToolMessage(role="tool", tool_call_id=block.tool_use_id, content=content))
    return messages


def _answer(blocks: Sequence[RequestModel]) -> AssistantMessage:
    def call(block: ToolUseBlock) -> PastCall:
        text = block.input if isinstance(block.input, str) else json.dumps(block.input, ensure_ascii=False)
        return PastCall(type="function", id=block.id, function=PastFunction(name=block.name, arguments=text))

    return AssistantMessage(
        role="assistant",
        content=[block for block in blocks if isinstance(block, TextPart)] or None,
        tool_calls=[call(block) for block in blocks if isinstance(block, ToolUseBlock)] or None,
        reasoning_content="".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)) or None,
    )
