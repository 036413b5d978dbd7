"""Messages: one turn of a conversation, as chat completions and responses take it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.fields import Name, RequestModel, Text
from deployments.openai.tools import PastCall


class TextPart(RequestModel):
    """A piece of a message's text."""

    type: Literal["text"]
    text: Text
    cache_control: dict[str, Any] | None = None
    """Accepted and ignored: prefixes stay cached until their room is needed."""


Content = Text | Annotated[list[TextPart], Field(min_length=1)]


class Message(RequestModel):
    """What messages of all roles share: text, or parts of text. Other parts (images, audio) are refused."""

    content: Content | None
    name: Name | None = None
    """The speaker's name, for chat templates that show it."""

    def text(self) -> str:
        """Return the content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class SystemMessage(Message):
    """What the answer should be like."""

    role: Literal["system", "developer"]
    """Developer is another name for system."""
    content: Content


class UserMessage(Message):
    """What the user says."""

    role: Literal["user"]
    content: Content


class AssistantMessage(Message):
    """An earlier answer, as it came."""

    role: Literal["assistant"]
    content: Content | None = None
    """Null is no text, as beside tool calls."""
    tool_calls: list[PastCall] | None = None
    """The calls in it."""
    reasoning_content: Text | None = None
    """What the model thought before it, for chat templates that show it."""
    annotations: list[Any] | None = None
    """Accepted and ignored: earlier answers come back with it."""


class ToolMessage(Message):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Text
    """The call."""


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
"""One message of a conversation."""


def message_of(role: Literal["system", "developer", "user", "assistant"], text: str) -> ChatMessage:
    """Return a message of text."""
    match role:
        case "user":
            return UserMessage(role=role, content=text)
        case "assistant":
            return AssistantMessage(role=role, content=text)
        case _:
            return SystemMessage(role=role, content=text)
