"""Messages: one turn of a conversation, as chat completions and responses take it."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from deployments.openai.fields import Name, RequestModel, Text
from deployments.openai.tools import PastCall


class TextPart(RequestModel):
    """A piece of a message's text."""

    type: Literal["text"]
    text: Text


class ChatMessage(RequestModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks; developer is another name for system."""
    content: Text | Annotated[list[TextPart], Field(min_length=1)] | None = None
    """Text, or parts of text; null beside tool calls. Other parts (images, audio) are refused."""
    name: Name | None = None
    """The speaker's name, for chat templates that show it."""
    tool_calls: Annotated[list[PastCall], Field(min_length=1)] | None = None
    """The calls in an earlier answer."""
    tool_call_id: Text | None = None
    """The call that this is the result of."""

    @model_validator(mode="after")
    def _check_role(self) -> "ChatMessage":
        if self.content is None and self.tool_calls is None:
            raise ValueError("content is required")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls is for the role assistant, not {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id goes with the role tool, and only with it")
        return self

    def text(self) -> str:
        """Return the content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class InputPart(RequestModel):
    """A piece of an item's text, or of an earlier answer's."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = None
    """Accepted and ignored: earlier answers come back with it."""
    logprobs: list[Any] | None = None
    """Accepted and ignored: earlier answers come back with it."""


class InputMessage(RequestModel):
    """One message of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputPart], Field(min_length=1)]
    id: Text | None = None
    """Accepted and ignored: earlier answers come back with it."""
    status: Text | None = None
    """Accepted and ignored: earlier answers come back with it."""

    def to_chat(self) -> ChatMessage:
        """Return the same message as chat completions have it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return ChatMessage(role=self.role, content=text)
